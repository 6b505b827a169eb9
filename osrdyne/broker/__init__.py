"""RabbitMQ as a pool needs it: leadership, topology, publishing, queues and the management API."""

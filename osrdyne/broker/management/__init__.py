"""RabbitMQ's management HTTP API: listings, policies, parameters, users of workers."""

"""The request queues loop and the checks of queues and topology against RabbitMQ."""

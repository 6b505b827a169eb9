"""A private RabbitMQ node on loopback ports."""

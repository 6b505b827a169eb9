"""Commands about access: tokens of the HTTP API, RabbitMQ users of clients, and the audit."""

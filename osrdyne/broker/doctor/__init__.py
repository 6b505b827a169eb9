"""The checks of `osrdyne doctor` that concern RabbitMQ."""

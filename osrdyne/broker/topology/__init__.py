"""The objects that a pool declares on RabbitMQ, as data: exchanges, queues, bindings, policies. Pure."""

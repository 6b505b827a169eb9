"""The worker process around its requests: broker connection, control messages, reports, settings, health, exit."""

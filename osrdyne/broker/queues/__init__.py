"""Commands on request queues and retry queues, in the way that loses no message."""

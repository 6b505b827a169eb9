"""The observed state of the queues in this term: bindings, waiting requests, lag. No I/O."""

"""The state of groups, queues and workers in this term. No I/O."""

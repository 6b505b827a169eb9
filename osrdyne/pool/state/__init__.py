"""What this term knows of groups, queues and workers. No I/O."""

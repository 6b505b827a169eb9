"""Commands about the groups, queues, circuits and quotas of a running pool."""

"""The leader's confirmed publisher, and the isolation of queues that confirm nothing."""

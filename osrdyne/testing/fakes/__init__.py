"""A broker in memory, and a leader on it in virtual time: for tests of the daemon and of its HTTP API."""

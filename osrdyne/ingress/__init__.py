"""The decisions about a request of a managed pool before it reaches a queue: pure functions on values."""

"""The HTTP API: the state of the pool, and the commands of operators."""

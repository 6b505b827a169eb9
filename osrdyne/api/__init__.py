"""The HTTP API: what the pool shows of itself, and the few things a person may ask of it."""

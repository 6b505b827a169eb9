"""Queue policies: limits of the size, age and number of the requests of a key. Pure."""

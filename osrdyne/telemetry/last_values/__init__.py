"""Last values: the newest event of each series, read from the log into a database."""

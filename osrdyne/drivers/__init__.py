"""Worker group drivers: the only package that starts workers."""

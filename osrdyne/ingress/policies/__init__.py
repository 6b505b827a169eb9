"""Queue policies: how large, old and many the requests of a key may be. Pure."""

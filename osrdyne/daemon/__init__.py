"""The daemon: composition root, one leader's term, and what it shows of itself."""

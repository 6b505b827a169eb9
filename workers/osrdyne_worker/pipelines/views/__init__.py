"""The data of a key as views of its session: which files, how they are opened and cached, and their version."""

"""The splitter: rules that send requests of one key to groups of their own. Pure."""

"""JSON and YAML documents of users, read with every problem in its place. Pure."""

"""Access control: tokens, roles, grants, and the decision about one request of the HTTP API. Pure."""

"""Who may do what: tokens, roles and the decision for one request of the HTTP API. Pure; used by `api` and the CLI."""

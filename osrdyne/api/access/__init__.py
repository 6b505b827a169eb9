"""Who sends a request and what they may do: identification, permission, the checks before every request, the audit."""

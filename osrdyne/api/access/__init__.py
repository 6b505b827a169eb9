"""Access to the API: identification of the sender, grants, the checks before every request, and the audit."""

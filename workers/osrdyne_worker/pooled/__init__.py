"""Pooled worker processes: the workers of many keys in one process. Source: docs/reference/protocol/pooled.md."""

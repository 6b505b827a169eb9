"""The poison inventory: entries, readings, evidence."""

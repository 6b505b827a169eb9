"""Processors: each consumes one queue of the controller, and only while it leads."""

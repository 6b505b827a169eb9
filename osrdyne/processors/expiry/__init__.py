"""Expired requests that wait behind others in their queue."""

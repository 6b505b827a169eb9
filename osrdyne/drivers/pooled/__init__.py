"""Pooled workers: a driver that places the workers of many keys in a few processes of another driver."""

"""Pooled workers: a driver that places the workers of many keys in few processes of another driver."""

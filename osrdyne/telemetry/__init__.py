"""Telemetry beside the path of requests: positions of the readers of the log, and how far they are behind."""

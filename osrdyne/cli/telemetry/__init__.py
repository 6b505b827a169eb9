"""Commands about the log of telemetry, its readers, and last values."""

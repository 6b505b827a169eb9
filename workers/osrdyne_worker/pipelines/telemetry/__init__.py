"""Ingest of telemetry: reads the log, stores its events in tables, and answers `/ingest`."""

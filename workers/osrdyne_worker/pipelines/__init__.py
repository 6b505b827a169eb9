"""The applications that come with the worker: the SQL pipeline (`sql`) and the ingest of telemetry (`ingest`)."""

"""Configuration: small frozen models by subject, and where each value came from."""

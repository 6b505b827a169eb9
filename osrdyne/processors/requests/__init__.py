"""Requests on their way to a worker: orphans, the ingress of managed pools, cancellations."""

"""The path of a request through the worker: intake, scheduling, dispatch to its handler, outcome, reply, retry."""

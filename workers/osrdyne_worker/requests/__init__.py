"""The path of a request through the worker: intake, priorities, dispatch to its handler, outcome, reply, retry."""

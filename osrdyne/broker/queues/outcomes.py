"""What became of an attempt to delete a request queue, and of a check of the queues of a group."""

from __future__ import annotations

from enum import StrEnum


class DeleteOutcome(StrEnum):
    """Only DELETED has deleted anything; each of the others is a reason to try later, or not at all."""

    DELETED = "deleted"
    NOT_EMPTY = "not empty"
    IN_USE = "in use"
    NO_EVIDENCE = "no evidence"


class QueueCheck(StrEnum):
    """What RabbitMQ answers about the queues of a group that are believed bound."""

    INTACT = "intact"
    MISSING = "missing"
    """At least one queue of the group does not exist."""
    UNBOUND = "unbound"
    """All exist, at least one binding does not."""
    UNKNOWN = "unknown"
    """All exist; the HTTP API did not say whether they are bound."""

"""What became of an attempt to delete a request queue."""

from __future__ import annotations

from enum import StrEnum


class DeleteOutcome(StrEnum):
    """Only DELETED has deleted anything; each of the others is a reason to try later, or not at all."""

    DELETED = "deleted"
    NOT_EMPTY = "not empty"
    IN_USE = "in use"
    NO_EVIDENCE = "no evidence"

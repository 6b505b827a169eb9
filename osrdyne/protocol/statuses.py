"""Outcomes of a request: `x-status` and `x-code`. Source: docs/reference/protocol/responses.md."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """The terminal outcome of a request, as in the header `x-status`."""

    OK = "ok"
    ERROR = "error"
    EXPIRED = "expired"
    REJECTED = "rejected"
    MAXLEN = "maxlen"
    DELIVERY_LIMIT = "delivery_limit"
    CANCELLED = "cancelled"
    START_FAILED = "start-failed"
    CAPACITY = "capacity"
    NOT_RUNNING = "not-running"
    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NO_ROUTE = "no-route"
    POISON = "poison"
    TOO_LARGE = "too-large"
    QUEUE_FULL = "queue-full"
    QUOTA_EXCEEDED = "quota-exceeded"
    RATE_LIMITED = "rate-limited"
    GONE = "gone"
    CIRCUIT_OPEN = "circuit-open"


CODES: dict[Status, int] = {
    Status.OK: 200,
    Status.ERROR: 500,
    Status.EXPIRED: 504,
    Status.REJECTED: 502,
    Status.MAXLEN: 429,
    Status.DELIVERY_LIMIT: 502,
    Status.CANCELLED: 499,
    Status.START_FAILED: 503,
    Status.CAPACITY: 503,
    Status.NOT_RUNNING: 503,
    Status.INVALID: 400,
    Status.UNAUTHORIZED: 401,
    Status.FORBIDDEN: 403,
    Status.NO_ROUTE: 404,
    Status.POISON: 422,
    Status.TOO_LARGE: 413,
    Status.QUEUE_FULL: 429,
    Status.QUOTA_EXCEEDED: 429,
    Status.RATE_LIMITED: 429,
    Status.GONE: 410,
    Status.CIRCUIT_OPEN: 503,
}
"""The default `x-code` of each status; a handler's own code replaces it."""


REFERENCE_ERROR = "core_error"
"""The only status besides `ok` that the reference client accepts."""


def encode_status(status: Status | str) -> bytearray:
    """`x-status` on the wire: a byte array (AMQP type `x`), the only type that the reference client reads."""
    return bytearray(str(status), "utf-8")


def decode_text(value: object) -> str | None:
    """The text of a header, which may be a string or a byte array; None for any other type."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", errors="replace")
    return None

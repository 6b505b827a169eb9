"""The refusal of a key: the error with which its requests are answered instead of starting a worker.

A worker whose `on_start` raises `RequestError` reports it before it ends; the controller answers with it until it tries
the next start. Source: docs/reference/protocol/reports.md, "Activity reports".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.messages import header_text

REFUSAL_FIELD = "refusal"
"""Of `failed` reports: the error with which the application refuses the key."""
MAX_ERROR_CODE = 100
MAX_DETAILS = 4000
"""Characters of the details as JSON; longer ones are left out."""


@dataclass(frozen=True, slots=True)
class KeyRefusal:
    """An error of a key, as a handler would answer it: `code` is the HTTP-like number, `error_code` a word for
    programs, `details` further JSON facts."""

    message: str
    code: int
    error_code: str
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_of_key(self) -> bool:
        """Whether the key itself is refused; otherwise something else failed, and may work soon."""
        return self.code < 500

    def to_wire(self) -> dict[str, object]:
        return {
            "message": header_text(self.message),
            "code": self.code,
            "error_code": self.error_code,
            "details": dict(self.details) if _fits(self.details) else {},
        }


def refusal_of(report: ActivityReport) -> KeyRefusal | None:
    """The refusal in a report; None if it has none, or a malformed one."""
    if report.event is not Event.FAILED:
        return None
    match report.details.get(REFUSAL_FIELD):
        case {"message": str(message), "code": int(code), "error_code": str(error_code), **rest} if 400 <= code <= 599:
            details = rest.get("details")
            known = details if isinstance(details, dict) and _fits(details) else {}
            return KeyRefusal(header_text(message), code, header_text(error_code, limit=MAX_ERROR_CODE), known)
        case _:
            return None


def _fits(details: Mapping[str, object]) -> bool:
    """Whether JSON can represent the details, and they are short enough for a report."""
    try:
        return len(json.dumps(details)) <= MAX_DETAILS
    except (TypeError, ValueError, RecursionError):
        return False

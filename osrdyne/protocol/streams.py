"""Streamed answers: their headers, and the credit that a client grants. Source: docs/reference/protocol/streams.md.

The parts of a stream are non-terminating replies. Their bodies, one after the other, are one Arrow IPC stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from osrdyne.protocol.statuses import decode_text

CREDIT_HEADER = "x-stream-credit"
STREAM_HEADER = "x-stream-id"
PART_HEADER = "x-stream-part"
ATTEMPT_HEADER = "x-stream-attempt"
PARTS_HEADER = "x-stream-parts"
ROWS_HEADER = "x-stream-rows"

PART_BYTES = 4 * 1024 * 1024
"""The largest body of a part, unless a single row is larger."""
DEFAULT_CREDIT = 4
MAX_CREDIT = 64
"""How many parts a worker may be ahead of its client at most, even if the client grants more."""
GRANT_INTERVAL = 15.0
"""Seconds after which a client repeats its credit, to replace a lost message and to show that it still reads."""
SILENCE_TIMEOUT = 60.0
"""Seconds without a credit message after which a worker without credit ends the stream."""

_STREAM_ID = re.compile(r"[0-9a-f]{32}\Z")


def read_wanted_credit(headers: Mapping[str, object]) -> int | None:
    """The credit of a request for a stream; None if the request is not for a stream."""
    value = headers.get(CREDIT_HEADER)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return None
    return min(value, MAX_CREDIT)


@dataclass(frozen=True, slots=True)
class Grant:
    """A credit message: the worker may send the parts of this stream up to the number `up_to`.

    The number counts from the first part, so that a lost, repeated or late message is harmless.
    """

    stream_id: str
    up_to: int

    def wire_headers(self) -> dict[str, object]:
        return {STREAM_HEADER: self.stream_id, CREDIT_HEADER: self.up_to}

    @classmethod
    def from_wire(cls, headers: Mapping[str, object]) -> Grant | None:
        """Parse a credit message; None if malformed."""
        stream_id, up_to = decode_text(headers.get(STREAM_HEADER)), headers.get(CREDIT_HEADER)
        if stream_id is None or not _STREAM_ID.match(stream_id):
            return None
        if not isinstance(up_to, int) or isinstance(up_to, bool) or up_to < 0:
            return None
        return cls(stream_id, up_to)


@dataclass(frozen=True, slots=True)
class PartName:
    """The stream and number of a part; of the final reply, the number of parts before it."""

    stream_id: str
    number: int

    @classmethod
    def of(cls, headers: Mapping[str, object], *, final: bool) -> PartName | None:
        """Parse the headers of a reply; None if it belongs to no stream."""
        stream_id, number = decode_text(headers.get(STREAM_HEADER)), headers.get(PARTS_HEADER if final else PART_HEADER)
        if stream_id is None or not isinstance(number, int) or isinstance(number, bool):
            return None
        return cls(stream_id, number)

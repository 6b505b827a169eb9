"""The audit record of a change through the API: its fields, its text, and the selection of records. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from urllib.parse import unquote_to_bytes

MAX_TEXT = 1_000
"""Characters of one field; a longer text is cut."""

MAX_TARGET = 8_000
"""Characters of the target: the ids of 100 entries."""

_CURSOR = re.compile(r"([0-9]{1,17})-([0-9a-f]{32})\Z", re.ASCII)


class Outcome(StrEnum):
    """The outcome of a change. `unknown`: the daemon ended during the change, or could not store the second record."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One change. `at_ms`: when it was requested, in milliseconds since the epoch. `grant`: the grant that it needs.
    `method`: how the principal was identified. `author`: as the request claims. Digests are SHA-256 of the stored
    document; None: no document."""

    request_id: str
    at_ms: int
    principal: str
    method: str
    role: str | None = None
    grant: str | None = None
    address: str | None = None
    action: str
    target: str | None = None
    author: str | None = None
    digest_before: str | None = None
    digest_after: str | None = None
    status: int | None = None
    outcome: Outcome = Outcome.UNKNOWN

    @property
    def is_final(self) -> bool:
        return self.outcome is not Outcome.UNKNOWN

    @property
    def place(self) -> tuple[int, str]:
        return self.at_ms, self.request_id

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


_NAMES = frozenset(field.name for field in fields(AuditRecord))
_NUMBERS = frozenset({"at_ms", "status"})


def parse_record(text: bytes) -> AuditRecord | None:
    """Parse the body of a message; None if malformed."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    known = {name: value for name, value in values.items() if name in _NAMES}
    for name, value in known.items():
        expected = int if name in _NUMBERS else str
        if value is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            return None
    try:
        known["outcome"] = Outcome(known.get("outcome") or "")
        record = AuditRecord(**known)
    except (TypeError, ValueError):
        return None
    needed = (record.request_id, record.at_ms, record.principal, record.method, record.action)
    return None if None in needed else record


def outcome_of(status: int) -> Outcome:
    """The outcome of a change by the HTTP status of its answer."""
    if status < 400:
        return Outcome.DONE
    return Outcome.REFUSED if status < 500 else Outcome.FAILED


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """The text, cut to the limit."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def target_of(parts: Iterable[str], query: str, names: Collection[str]) -> str | None:
    """The target of a request, from the raw parameters of its path and its raw query; None for the whole pool.

    `names`: the parameters of the query that the endpoint reads. Others could displace these in the record.
    """
    found = [_decoded(part) for part in parts]
    found += [value if name == "key" else f"{name} {value}" for name, value in _parameters(query) if name in names]
    # Each part is bounded: a long one must not displace those after it.
    return shortened(", ".join(shortened(text, MAX_TEXT // 2) for text in found), MAX_TARGET) if found else None


def author_of(query: str) -> str | None:
    """The author that a request claims; of several the last one, as the endpoint reads them."""
    given = [value for name, value in _parameters(query) if name == "author"]
    return shortened(given[-1]) if given else None


def _parameters(query: str) -> Iterator[tuple[str, str]]:
    """Names and values, decoded, because the endpoint decodes names as well."""
    for pair in query.split("&"):
        name, _, value = pair.replace("+", " ").partition("=")
        yield _decoded(name), _decoded(value)


def _decoded(text: str) -> str:
    # Only to be shown: bytes that are not UTF-8 are escaped.
    return unquote_to_bytes(text.encode("latin-1", "replace")).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """A selection of records, the newest first. `since` and `until`: seconds since the epoch. `action`: an action, or
    the part before its dot, such as `routes`. `before`: the cursor of the previous page."""

    since: float | None = None
    until: float | None = None
    principal: str | None = None
    action: str | None = None
    before: tuple[int, str] | None = None
    limit: int = 100

    def matches(self, record: AuditRecord) -> bool:
        return (
            (self.since is None or record.at_ms >= self.since * 1000)
            and (self.until is None or record.at_ms < self.until * 1000)
            and (self.principal is None or record.principal == self.principal)
            and (self.action is None or f"{record.action}.".startswith(f"{self.action}."))
        )


@dataclass(frozen=True, slots=True)
class AuditPage:
    """A page of records, the newest first. `total`: the number of all that match. `following`: the cursor of the next
    page."""

    records: tuple[AuditRecord, ...]
    total: int
    following: str | None = None


def parse_cursor(text: str) -> tuple[int, str]:
    """Parse a cursor of `AuditPage.following`. Raises ValueError."""
    found = _CURSOR.match(text)
    if found is None:
        raise ValueError("invalid cursor")
    return int(found[1]), found[2]


def page_of(records: Iterable[AuditRecord], query: AuditQuery) -> AuditPage:
    """The page of a query. Of the records of one request the final one is used, if there is one."""
    latest: dict[str, AuditRecord] = {}
    for record in records:
        known = latest.get(record.request_id)
        if known is None or record.is_final or not known.is_final:
            latest[record.request_id] = record
    found = sorted(filter(query.matches, latest.values()), key=lambda record: record.place, reverse=True)
    rest = [record for record in found if query.before is None or record.place < query.before]
    page = tuple(rest[: query.limit])
    following = f"{page[-1].at_ms}-{page[-1].request_id}" if len(rest) > len(page) else None
    return AuditPage(page, len(found), following)

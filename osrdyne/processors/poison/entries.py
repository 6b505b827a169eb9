"""Poison entries: made from dead letters, shown to operators, selected by queries, turned into requests again. Pure.

An entry is the request itself, in the queue `P-poison`, with additional headers. Other messages in that queue are shown
as well and not trusted: every function here accepts any message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import NamedTuple
from uuid import uuid4

from osrdyne.amqp import Delivery, Message
from osrdyne.errors import PoisonNotFoundError
from osrdyne.pool.views import PoisonQuery
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import (
    AUTHORIZATION_HEADER,
    BROKER_HEADERS,
    FAILED_DELIVERIES_HEADER,
    HOPS_HEADER,
    PATH_HEADER,
    PUT_BACKS_HEADER,
    REPLAY_HEADER,
)
from osrdyne.protocol.poison import PoisonRecord, WorkerDeath
from osrdyne.protocol.statuses import Status, decode_text

UNIQUE_HEADER = "x-osrdyne-poison-id"
KEY_HEADER = "x-osrdyne-poison-key"
REASON_HEADER = "x-osrdyne-poison-reason"
DELIVERIES_HEADER = "x-osrdyne-poison-deliveries"
FIRST_AT_HEADER = "x-osrdyne-poison-first-ms"
LAST_AT_HEADER = "x-osrdyne-poison-last-ms"
DEATHS_HEADER = "x-osrdyne-poison-deaths"
LEFT_OUT_HEADER = "x-osrdyne-poison-left-out"
_OURS = frozenset(
    {
        UNIQUE_HEADER,
        KEY_HEADER,
        REASON_HEADER,
        DELIVERIES_HEADER,
        FIRST_AT_HEADER,
        LAST_AT_HEADER,
        DEATHS_HEADER,
        LEFT_OUT_HEADER,
    }
)
# All properties of a message must fit into one frame of 128 KiB; a larger one would close the connection.
MAX_PROPERTIES_BYTES = 120_000
MAX_EVIDENCE_BYTES = 32_000
MAX_DEATHS = 20
MAX_LINE = 500
MAX_PAGE_BYTES = 32 * 1024 * 1024  # Bodies in one page; a single larger one is a page of its own.


def poison_entry(
    delivery: Delivery,
    *,
    reason: Status = Status.DELIVERY_LIMIT,
    deliveries: int,
    now_ms: int,
    deaths: Sequence[WorkerDeath] = (),
) -> Message:
    """The message to store in the inventory; it never expires there.

    If it is too large, log lines are left out first, then deaths, then the largest headers of the request.
    """
    # Credentials of the client are not kept: readers of the inventory must not see them.
    secret = {name for name in delivery.headers if name.lower() == AUTHORIZATION_HEADER}
    kept = _without(delivery.headers, _OURS | secret)
    ours: dict[str, object] = {
        UNIQUE_HEADER: uuid4().hex,
        KEY_HEADER: delivery.routing_key,
        REASON_HEADER: str(reason),
        DELIVERIES_HEADER: deliveries,
        LAST_AT_HEADER: now_ms,
    }
    first = _first_moment(delivery, deaths)
    if first is not None:
        ours[FIRST_AT_HEADER] = first
    # The request before its evidence: log lines can be looked up elsewhere, a lost header cannot.
    for evidence in _evidence(deaths):
        entry = delivery.to_message(headers={**kept, **ours, **evidence}, expiration=None)
        if _properties_bytes(entry) <= MAX_PROPERTIES_BYTES:
            return entry
    left_out: list[str] = []
    while _properties_bytes(entry) > MAX_PROPERTIES_BYTES and kept:
        # The largest first, so that as few headers as possible are lost.
        largest = max(kept, key=lambda name: len(repr(kept[name])))
        del kept[largest]
        left_out.append(largest)
        ours[LEFT_OUT_HEADER] = ", ".join(left_out)[:1000]
        entry = delivery.to_message(headers={**kept, **ours}, expiration=None)
    return entry


def bare_entry(delivery: Delivery, *, reason: Status, now_ms: int) -> Message:
    """An entry without the headers of its message, which may be what the controller fails on."""
    return Message(
        body=delivery.body,
        correlation_id=delivery.properties.correlation_id,
        reply_to=delivery.properties.reply_to,
        headers={
            UNIQUE_HEADER: uuid4().hex,
            KEY_HEADER: delivery.routing_key,
            REASON_HEADER: str(reason),
            DELIVERIES_HEADER: 0,
            LAST_AT_HEADER: now_ms,
            LEFT_OUT_HEADER: "all headers",
        },
    )


def replayed(delivery: Delivery) -> Message:
    """The request of an entry as it was, without its old deadline and with one more replay counted."""
    # The old deadline has passed, and hops and failures are those of earlier deliveries: with them the request could be
    # refused.
    earlier = {DEADLINE_HEADER, HOPS_HEADER, FAILED_DELIVERIES_HEADER, PUT_BACKS_HEADER}
    headers = _without(delivery.headers, _OURS | earlier)
    headers[REPLAY_HEADER] = _replays(delivery.headers) + 1
    return delivery.to_message(headers=headers, expiration=None)


def entry_id(delivery: Delivery) -> str:
    """The id of an entry: a digest of everything that does not change in the queue. Equal entries have equal ids."""
    message = delivery.to_message(headers=delivery.headers, expiration=None)
    # Computed and not stored: messages of other programs in the queue have an id as well.
    digest = blake2b(digest_size=16)
    for part in (repr(sorted(message.headers.items())), repr(replace(message, headers={}, body=b""))):
        digest.update(part.encode("utf-8", "surrogatepass"))
    digest.update(message.body)
    return digest.hexdigest()


def key_of(headers: Mapping[str, object]) -> str | None:
    """The raw key of an entry; None for a message that osrdyne did not store."""
    key = headers.get(KEY_HEADER)
    if isinstance(key, bytes | bytearray):
        return key.decode("utf-8", "surrogateescape")
    return key if isinstance(key, str) else None


def view_entry(delivery: Delivery, *, name: str) -> PoisonRecord:
    """An entry as the API shows it; `name` is its id."""
    headers, properties = delivery.headers, delivery.properties
    deliveries = _number(headers.get(DELIVERIES_HEADER))
    deaths = _read_deaths(headers.get(DEATHS_HEADER))
    return PoisonRecord(
        id=name,
        key=key_of(headers),
        path=decode_text(headers.get(PATH_HEADER)) or "",
        correlation_id=properties.correlation_id,
        reply_to=properties.reply_to,
        message_id=properties.message_id,
        app_id=properties.app_id,
        content_type=properties.content_type,
        reason=decode_text(headers.get(REASON_HEADER)) or "unknown",
        deliveries=deliveries,
        deaths=deaths,
        finding=finding(deliveries, deaths),
        replays=_replays(headers),
        first_at=_seconds(headers.get(FIRST_AT_HEADER)),
        last_at=_seconds(headers.get(LAST_AT_HEADER)),
        size_bytes=len(delivery.body),
        headers=_without(headers, (_OURS - {LEFT_OUT_HEADER}) | BROKER_HEADERS),
        body=delivery.body,
    )


def finding(deliveries: int | None, deaths: Sequence[WorkerDeath]) -> str:
    """The evidence in one or two sentences for an operator."""
    if deliveries is None:
        return "This message was not stored by osrdyne; nothing is known about it."
    if deliveries == 0:
        return "No worker has received this request: the controller failed on it, and its log shows why."
    if not deaths:
        return (
            "No worker is known to have died while it ran this request, which may be innocent: RabbitMQ also counts "
            "lost connections and, before 4.3, requests that a worker returned."
        )
    alone = sum(death.others == 0 for death in deaths)
    text = f"{len(deaths)} of {deliveries} deliveries ended with the death of the worker that ran it"
    if alone == len(deaths):
        text += ", each time with nothing else running."
    elif alone:
        text += f", {alone} of them with nothing else running."
    else:
        text += ", always with other requests beside it: any of them may be the cause."
    last = deaths[-1]
    return f"{text} The last one: {last.ended_with}{f': {last.said}' if last.said else '.'}"


class Cursor(NamedTuple):
    """The position of an entry in the order: when it was stored, in milliseconds since the epoch, and its id."""

    at_ms: int
    id: str

    def __str__(self) -> str:
        return f"{self.at_ms}-{self.id}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Raises `PoisonNotFoundError`."""
        moment, _, name = text.rpartition("-")
        try:
            return cls(int(moment), name)
        except ValueError:
            raise PoisonNotFoundError("Invalid `after` cursor; omit it to start at the first page.") from None


def cursor_of(view: PoisonRecord) -> Cursor:
    return Cursor(0 if view.last_at is None else round(view.last_at * 1000), view.id)


def matches(view: PoisonRecord, query: PoisonQuery, *, now: float) -> bool:
    """Whether the entry matches the query. One without a time is older than all others."""
    age = float("inf") if view.last_at is None else now - view.last_at
    return (
        (query.keys is None or view.key in query.keys)
        and (query.path is None or view.path == query.path)
        and (query.older_than is None or age > query.older_than)
        and (query.newer_than is None or age < query.newer_than)
    )


def page_of(
    views: Sequence[PoisonRecord], *, after: Cursor | None, limit: int, with_bodies: bool
) -> list[PoisonRecord]:
    """The entries of the next page, at least one if there is any; `views` are in order."""
    page: list[PoisonRecord] = []
    size_bytes = 0
    for view in views:
        if after is not None and cursor_of(view) <= after:
            continue
        size_bytes += view.size_bytes if with_bodies else 0
        if len(page) == limit or (page and size_bytes > MAX_PAGE_BYTES):
            break
        page.append(view)
    return page


def resolve(name: str, views: Sequence[PoisonRecord]) -> PoisonRecord:
    """The entry with this id, or the only one whose id begins with it. Raises `PoisonNotFoundError`."""
    found = [view for view in views if view.id == name] or [view for view in views if name and view.id.startswith(name)]
    if not found:
        raise PoisonNotFoundError(f"There is no entry {name} in the poison inventory.")
    if len(found) > 1:
        raise PoisonNotFoundError(f"More than one entry of the poison inventory begins with {name}.")
    return found[0]


def _without(headers: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in headers.items() if name not in names}


def _first_moment(delivery: Delivery, deaths: Sequence[WorkerDeath]) -> int | None:
    """When the request was published, if it has a timestamp; else when a worker first died while it ran it."""
    timestamp = delivery.properties.timestamp
    moments = [] if timestamp is None else [int(timestamp.timestamp() * 1000)]
    moments += [int(death.at * 1000) for death in deaths]
    return min(moments, default=None)


def _evidence(deaths: Sequence[WorkerDeath]) -> Iterator[dict[str, object]]:
    """The header with the evidence: in full, then shorter, then left out."""
    latest = deaths[-MAX_DEATHS:]
    for lines in (20, 5, 0) if latest else ():
        short = [asdict(replace(one, log_lines=_last(one.log_lines, lines))) for one in latest]
        text = json.dumps(short, separators=(",", ":"))
        if len(text) <= MAX_EVIDENCE_BYTES:
            yield {DEATHS_HEADER: text}
    yield {}


def _last(lines: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(line[:MAX_LINE] for line in lines[max(0, len(lines) - count) :])


def _read_deaths(value: object) -> tuple[WorkerDeath, ...]:
    try:
        items = json.loads(decode_text(value) or "[]")
    except (ValueError, RecursionError):
        return ()
    return tuple(_read_death(item) for item in items if isinstance(item, dict)) if isinstance(items, list) else ()


def _read_death(item: Mapping[str, object]) -> WorkerDeath:
    lines, said = item.get("log_lines"), item.get("said")
    return WorkerDeath(
        worker_id=str(item.get("worker_id", "")),
        ended_with=str(item.get("ended_with", "")),
        said=None if said is None else str(said),
        at=_moment(item.get("at")),
        log_lines=tuple(str(line) for line in lines) if isinstance(lines, list) else (),
        others=_number(item.get("others")) or 0,
    )


def _moment(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else 0.0


def _properties_bytes(message: Message) -> int:
    return len(message.properties().marshal())


def _seconds(milliseconds: object) -> float | None:
    number = _number(milliseconds)
    return None if number is None else number / 1000


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _replays(headers: Mapping[str, object]) -> int:
    return max(0, _number(headers.get(REPLAY_HEADER)) or 0)

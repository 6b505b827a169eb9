"""The poison inventory over HTTP: what an entry looks like there, and the routes under `/v1/poison`.

Text from the wire need not be text: bytes that are not UTF-8 are shown escaped. Credentials in headers are hidden.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from osrdyne.api.access import require
from osrdyne.api.keys import query_keys
from osrdyne.auth.roles import Role
from osrdyne.logs import mask_uri
from osrdyne.pool.state.crashes import WorkerDeath
from osrdyne.pool.views import PoisonInspector, PoisonOutcome, PoisonPage, PoisonQuery, PoisonView
from osrdyne.protocol.names import Key

MASK = "***"
_SECRET_HEADERS = ("authorization", "token", "secret", "password", "cookie")
_Entries = Annotated[list[str], Query(alias="id", min_length=1, max_length=100, description="Repeatable.")]


class Death(BaseModel):
    """A worker that died while it ran the request."""

    worker_id: str
    ended_with: str = Field(description="Exit code or signal.")
    said: str | None = Field(description="What the worker itself gave as its reason.")
    at: float
    log_lines: list[str]
    others: int = Field(description="Requests that ran beside it in the same worker.")

    @classmethod
    def of(cls, death: WorkerDeath) -> Death:
        return cls(
            worker_id=_readable(death.worker_id),
            ended_with=_readable(death.ended_with),
            said=None if death.said is None else _readable(death.said),
            at=death.at,
            log_lines=[_readable(line) for line in death.log_lines],
            others=death.others,
        )


class Entry(BaseModel):
    """One entry. `body` is text, or Base64 where it is not UTF-8; null in a list without bodies."""

    id: str
    key: str | None
    path: str
    correlation_id: str | None
    reply_to: str | None
    message_id: str | None
    app_id: str | None
    content_type: str | None
    reason: str
    deliveries: int | None = Field(description="RabbitMQ's count.")
    unexplained: int | None = Field(description="Deliveries that no known death explains.")
    finding: str
    deaths: list[Death]
    replays: int
    first_at: float | None
    last_at: float | None
    size_bytes: int
    headers: dict[str, Any]
    body: str | None
    body_encoding: Literal["text", "base64"] | None

    @classmethod
    def of(cls, view: PoisonView) -> Entry:
        body, encoding = _body(view.body)
        return cls(
            id=view.id,
            key=_valid_or_none(view.key),
            path=_valid(view.path),
            correlation_id=_valid_or_none(view.correlation_id),
            reply_to=_valid_or_none(view.reply_to),
            message_id=_valid_or_none(view.message_id),
            app_id=_valid_or_none(view.app_id),
            content_type=_valid_or_none(view.content_type),
            reason=_readable(view.reason),
            deliveries=view.deliveries,
            unexplained=view.unexplained,
            finding=_readable(view.finding),
            deaths=[Death.of(death) for death in view.deaths],
            replays=view.replays,
            first_at=view.first_at,
            last_at=view.last_at,
            size_bytes=view.size_bytes,
            headers={_valid(name): _header(name, value) for name, value in view.headers.items()},
            body=body,
            body_encoding=encoding,
        )


class Inventory(BaseModel):
    """Entries of the poison inventory, oldest first."""

    pool: str
    total: int = Field(description="How many match.")
    entries: list[Entry]
    next: str | None = Field(description="For `after=`, to get the next page; null at the end.")
    complete: bool = Field(description="False when the inventory holds more than is looked at.")

    @classmethod
    def of(cls, pool: str, page: PoisonPage) -> Inventory:
        entries = [Entry.of(view) for view in page.entries]
        return cls(pool=pool, total=page.total, entries=entries, next=page.next, complete=page.complete)


class Outcome(BaseModel):
    """What became of the entries that were named: done, not there, or refused and why."""

    done: list[str]
    missing: list[str]
    refused: dict[str, str]

    @classmethod
    def of(cls, outcome: PoisonOutcome) -> Outcome:
        refused = {name: _readable(why) for name, why in outcome.refused.items()}
        return cls(done=list(outcome.done), missing=list(outcome.missing), refused=refused)


def poison_routes(inspector: PoisonInspector) -> APIRouter:
    router = APIRouter(prefix="/v1/poison")

    @router.get("", summary="Entries of the poison inventory, oldest first; nothing is consumed")
    async def poison(
        request: Request,
        keys: Annotated[set[Key] | None, Depends(query_keys)],
        path: str | None = None,
        older_than: Annotated[float | None, Query(ge=0, description="Seconds since it came.")] = None,
        newer_than: Annotated[float | None, Query(ge=0, description="Seconds since it came.")] = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        bodies: bool = False,
    ) -> Inventory:
        if bodies:
            require(request, Role.OPERATE)  # a body may hold what only its sender and its worker should read
        query = PoisonQuery(
            keys=None if keys is None else frozenset(keys),
            path=path,
            older_than=older_than,
            newer_than=newer_than,
            after=after,
            limit=limit,
            bodies=bodies,
        )
        return Inventory.of(inspector.pool, await inspector.poison(query))

    @router.post("/replay", summary="Send the requests again and remove their entries")
    async def replay(entries: _Entries) -> Outcome:
        return Outcome.of(await inspector.replay_poison(entries))

    @router.post("/drop", summary="Remove entries for good")
    async def drop(entries: _Entries) -> Outcome:
        return Outcome.of(await inspector.drop_poison(entries))

    @router.get("/{entry}", summary="One entry with its body, by its id or the beginning of it")
    async def poison_entry(request: Request, entry: str) -> Entry:
        require(request, Role.OPERATE)
        return Entry.of(await inspector.poison_entry(entry))

    return router


def _valid(text: str) -> str:
    """As it is where it is Unicode; what is not, shown escaped: JSON could not hold it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _valid_or_none(text: str | None) -> str | None:
    return None if text is None else _valid(text)


def _readable(text: str) -> str:
    """Text for a person: valid, and without passwords."""
    return mask_uri(_valid(text))


def _body(body: bytes | None) -> tuple[str | None, Literal["text", "base64"] | None]:
    if body is None:
        return None, None
    text = _text(body)
    return (base64.b64encode(body).decode(), "base64") if text is None else (text, "text")


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _header(name: str, value: object) -> Any:
    return MASK if any(word in name.lower() for word in _SECRET_HEADERS) else _plain(value)


def _plain(value: object) -> Any:
    """An AMQP header value as JSON has it."""
    match value:
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return _readable(value)
        case bytes() | bytearray():
            text = _text(bytes(value))
            return base64.b64encode(value).decode() if text is None else mask_uri(text)
        case Mapping():
            return {_valid(str(name)): _header(str(name), item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)

"""The poison inventory over HTTP: the models of entries, and the routes under `/v1/poison`.

Bytes of messages that are not UTF-8 are escaped. Credentials in headers are hidden.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from osrdyne.api.access.checks import principal_of, require_keys, require_protected
from osrdyne.api.keys import query_keys
from osrdyne.auth.grants import Grant
from osrdyne.logs import mask_uri
from osrdyne.pool.views import PoisonInspector, PoisonPage, PoisonQuery, PoolInspector
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import PoisonRecord

MASK = "***"
_SECRET_HEADERS = ("authorization", "token", "secret", "password", "cookie")
_Entries = Annotated[list[str], Query(alias="id", min_length=1, max_length=100, description="Repeatable.")]


def escaped(text: str) -> str:
    """The text with lone surrogates escaped, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _valid(text: str | None) -> str | None:
    return None if text is None else escaped(text)


def _readable(text: str | None) -> str | None:
    """The text with lone surrogates escaped and without passwords."""
    return None if text is None else mask_uri(escaped(text))


def _text_or_base64(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()


def _body(body: bytes | None) -> str | None:
    return None if body is None else _text_or_base64(body)


def _headers(headers: Mapping[str, object]) -> dict[str, Any]:
    return {escaped(name): _header(name, value) for name, value in headers.items()}


def _header(name: str, value: object) -> Any:
    return MASK if any(word in name.lower() for word in _SECRET_HEADERS) else _plain(value)


def _plain(value: object) -> Any:
    """An AMQP header value as JSON."""
    match value:
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return mask_uri(escaped(value))
        case bytes() | bytearray():
            return mask_uri(_text_or_base64(bytes(value)))
        case Mapping():
            return {escaped(str(name)): _header(str(name), item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)


Valid = Annotated[str, BeforeValidator(_valid)]
OptionalValid = Annotated[str | None, BeforeValidator(_valid)]
Readable = Annotated[str, BeforeValidator(_readable)]
OptionalReadable = Annotated[str | None, BeforeValidator(_readable)]


class Death(BaseModel):
    """A worker that died while it ran the request."""

    model_config = ConfigDict(from_attributes=True)

    worker_id: Readable
    ended_with: Readable = Field(description="Exit code or signal.")
    said: OptionalReadable = Field(description="The reason that the worker itself reported.")
    at: float
    log_lines: list[Readable]
    others: int = Field(description="Other requests that ran in the same worker.")


class Entry(BaseModel):
    """One entry. `body` is text, or Base64 where it is not UTF-8; null in a list without bodies."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    key: OptionalValid
    path: Valid
    correlation_id: OptionalValid
    reply_to: OptionalValid
    message_id: OptionalValid
    app_id: OptionalValid
    content_type: OptionalValid
    reason: Readable
    deliveries: int | None = Field(description="RabbitMQ's count.")
    unexplained: int | None = Field(description="Deliveries that no known death explains.")
    finding: Readable
    deaths: list[Death]
    replays: int
    first_at: float | None
    last_at: float | None
    size_bytes: int
    headers: Annotated[dict[str, Any], BeforeValidator(_headers)]
    body: Annotated[str | None, BeforeValidator(_body)]
    body_encoding: Literal["text", "base64"] | None


class Inventory(BaseModel):
    """Entries of the poison inventory, oldest first."""

    pool: str
    total: int = Field(description="The number of matching entries.")
    entries: list[Entry]
    next: str | None = Field(description="For `after=`, to get the next page; null at the end.")
    complete: bool = Field(description="False if the inventory has more entries than were read.")

    @classmethod
    def of(cls, pool: str, page: PoisonPage) -> Inventory:
        entries = [Entry.model_validate(view) for view in page.entries]
        return cls(pool=pool, total=page.total, entries=entries, next=page.next, complete=page.complete)

    def to_json(self) -> str:
        """The JSON of the page. Each entry is encoded on its own: pydantic holds the GIL until a call is done."""
        entries = ",".join(one.model_dump_json() for one in self.entries)
        return f'{self.model_dump_json(exclude={"entries"})[:-1]},"entries":[{entries}]}}'


class Outcome(BaseModel):
    """The outcome for the entries that were named: done, missing, or refused with the reason."""

    model_config = ConfigDict(from_attributes=True)

    done: list[str]
    missing: list[str]
    refused: dict[str, Readable]


def poison_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1/poison")

    @router.get(
        "", summary="Entries of the poison inventory, oldest first; nothing is consumed", response_model=Inventory
    )
    async def poison(
        request: Request,
        keys: Annotated[set[Key] | None, Depends(query_keys)],
        path: str | None = None,
        older_than: Annotated[float | None, Query(ge=0, description="Seconds since it came.")] = None,
        newer_than: Annotated[float | None, Query(ge=0, description="Seconds since it came.")] = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        bodies: bool = False,
    ) -> Response:
        require_keys(request, Grant.VIEW, keys)
        if bodies:
            require_keys(request, Grant.BODIES, keys)  # bodies are for the sender and the worker only
        query = PoisonQuery(
            keys=None if keys is None else frozenset(keys),
            path=path,
            older_than=older_than,
            newer_than=newer_than,
            after=after,
            limit=limit,
            bodies=bodies,
        )
        page = await inspector.poison(query)
        # Also without bodies, entries hold headers of requests and lines of logs.
        require_protected(request, inspector, [Key(one.key) for one in page.entries if one.key is not None])
        return await _shown(lambda: Inventory.of(inspector.pool, page).to_json())

    @router.post("/replay", summary="Send the requests again and remove their entries")
    async def replay(request: Request, entries: _Entries) -> Outcome:
        await _require_entries(inspector, request, entries)
        return Outcome.model_validate(await inspector.replay_poison(entries))

    @router.post("/drop", summary="Remove entries permanently")
    async def drop(request: Request, entries: _Entries) -> Outcome:
        await _require_entries(inspector, request, entries)
        return Outcome.model_validate(await inspector.drop_poison(entries))

    @router.get("/{entry}", summary="One entry with its body, by its id or the beginning of it", response_model=Entry)
    async def poison_entry(request: Request, entry: str) -> Response:
        found = await inspector.poison_entry(entry)
        for grant in (Grant.VIEW, Grant.BODIES):
            _require_of(request, grant, found)
        require_protected(request, inspector, [] if found.key is None else [Key(found.key)])
        return await _shown(lambda: Entry.model_validate(found).model_dump_json())

    return router


async def _shown(to_json: Callable[[], str]) -> Response:
    """The answer with a model, which is made and encoded in a thread: an entry may have a body of many megabytes."""
    return Response(await asyncio.to_thread(to_json), media_type="application/json")


async def _require_entries(inspector: PoisonInspector, request: Request, entries: list[str]) -> None:
    """Raises `ForbiddenError` if an entry has a key that the principal may not operate."""
    if principal_of(request).is_limited(Grant.OPERATE):
        for entry in entries:
            _require_of(request, Grant.OPERATE, await inspector.poison_entry(entry))


def _require_of(request: Request, grant: Grant, entry: PoisonRecord) -> None:
    """Check a grant for the key of an entry; for all keys if it has no key. Raises `ForbiddenError`."""
    require_keys(request, grant, None if entry.key is None else [entry.key])

"""Record the changes through the API, count refused requests, and list the records: `/v1/audit`.

`Guard` calls `Auditor` for every request. The table of endpoints defines which of them are changes, so that a new
endpoint needs no code here. A change has two records: one before it, for whose confirm the API waits a few seconds at
most, and one with its outcome before the answer is sent. If the daemon dies in between, the first one remains.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from osrdyne.aio.clock import Clock
from osrdyne.aio.tasks import off_loop
from osrdyne.api.access.checks import address_of, principal_of_scope
from osrdyne.api.access.token_file import TokenChange
from osrdyne.api.problems import problem
from osrdyne.auth.audit import (
    AuditQuery,
    AuditRecord,
    Outcome,
    author_of,
    outcome_of,
    parse_cursor,
    shortened,
    target_of,
)
from osrdyne.auth.endpoints import find_endpoint
from osrdyne.errors import OsrdyneError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestKind
from osrdyne.pool.views import AuditInspector, PoolInspector

LOG_INTERVAL, LOGGED = 60.0, 10
"""At most 10 refused requests are logged in 60 seconds; all are counted."""

_DOCUMENTS = {f"/v1/{kind.path}{suffix}": kind for kind in ManifestKind for suffix in ("", "/rollback")}


@dataclass(slots=True)
class Change:
    """A change in progress, with its first record."""

    record: AuditRecord
    document: ManifestKind | None
    is_stored: bool


class Auditor:
    """The audit of one API. `required`: a change without a stored record is refused."""

    def __init__(self, inspector: PoolInspector, metrics: Metrics, *, clock: Clock, required: bool) -> None:
        self._inspector = inspector
        self._metrics = metrics
        self._clock = clock
        self._required = required
        self._logged_since, self._logged, self._unlogged = -LOG_INTERVAL, 0, 0
        self._log: Logger = get_logger("audit", pool=inspector.pool)

    async def begin(self, scope: Scope) -> Change | None:
        """Store the first record of a change; None for a request that changes nothing."""
        endpoint, parts = find_endpoint(scope["method"], scope["path"])
        if not endpoint.is_change:
            return None
        principal = principal_of_scope(scope)
        document = _DOCUMENTS.get(endpoint.path)
        query = scope["query_string"].decode("latin-1")
        author = author_of(query)
        record = AuditRecord(
            request_id=uuid.uuid4().hex,
            at_ms=int(self._clock.time() * 1000),
            principal=shortened(principal.name),
            method=str(principal.method),
            role=principal.role,
            grant=endpoint.grant,
            address=address_of(scope),
            action=endpoint.action,
            target=target_of(parts.values(), query, endpoint.target_parameters),
            author=None if author == principal.name else author,
            digest_before=await self._digest(document),
        )
        self._log.info("change requested", **_shown(record))
        return Change(record, document, await self._store(record))

    def refusal(self, change: Change) -> JSONResponse | None:
        """The refusal of a change whose record was not stored; None if the change may be made."""
        # A standby changes nothing, and its answer names the leader.
        if change.is_stored or not self._required or not self._inspector.leadership().leading:
            return None
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            code="audit-unavailable",
            detail="RabbitMQ did not confirm the record of this change, so nothing was changed.",
            remedy="See /ready, and try again later. audit.required: false makes changes without a record.",
        )

    async def finish(self, change: Change, status: int) -> None:
        """Store the record with the outcome. Crash before: the first record remains, with the outcome `unknown`."""
        try:
            record = replace(
                change.record,
                digest_after=await self._digest(change.document),
                status=status,
                outcome=outcome_of(status),
            )
            self._log.info("change finished", **_shown(record))
            await self._store(record)
        except Exception:
            # The change was made, so the answer is sent in any case.
            self._log.exception("outcome of a change not recorded", request_id=change.record.request_id)

    async def note_tokens(self, changes: list[TokenChange]) -> None:
        """Record that the file of API tokens was changed."""
        for change in changes:
            record = AuditRecord(
                request_id=uuid.uuid4().hex,
                at_ms=int(self._clock.time() * 1000),
                principal="local",
                method="file",
                action="tokens.change",
                target=shortened(change.detail),
                digest_before=change.before,
                digest_after=change.after,
                outcome=Outcome.DONE,
            )
            self._log.info("token file changed", **_shown(record))
            await self._store(record)

    def note_answer(self, scope: Scope, status: int) -> None:
        """Count a refused request, and log a limited number of them, because anyone can send them."""
        if status not in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            return
        self._metrics.api_refused.labels(status=str(int(status))).inc()
        now = self._clock.monotonic()
        if now - self._logged_since >= LOG_INTERVAL:
            self._logged_since, self._logged = now, 0
        if self._logged >= LOGGED:
            self._unlogged += 1
            return
        self._logged += 1
        unlogged, self._unlogged = self._unlogged, 0
        principal = principal_of_scope(scope)
        self._log.warning(
            "request refused",
            status=int(status),
            endpoint=f"{scope['method']} {find_endpoint(scope['method'], scope['path'])[0].path}",
            principal=shortened(principal.name),
            method=str(principal.method),
            address=address_of(scope),
            unlogged=unlogged,
        )

    async def _store(self, record: AuditRecord) -> bool:
        return self._inspector.leadership().leading and await self._inspector.record_change(record)

    async def _digest(self, kind: ManifestKind | None) -> str | None:
        if kind is None:
            return None
        try:
            kept = await self._inspector.current_manifest(kind)
        except OsrdyneError:
            return None
        if kept is None or kept.stored is None:
            return None
        return await off_loop(len(kept.stored), _digest_of, kept)


def _digest_of(kept: KeptManifest) -> str | None:
    try:
        return hashlib.sha256((kept.manifest or "").encode()).hexdigest()
    except ValueError:  # damaged, or stored by another program
        return None


def _shown(record: AuditRecord) -> dict[str, object]:
    return {name: value for name, value in asdict(record).items() if value is not None and name != "at_ms"}


class Entry(BaseModel):
    """One change. It shows no body and no secret."""

    at: float = Field(description="When it was requested, seconds since the epoch.")
    request_id: str = Field(description="As in the header `x-request-id` of the answer.")
    principal: str
    role: str | None = Field(description="The strongest role of the principal, perhaps for some keys only.")
    grant: str | None = Field(description="The grant that the change needs.")
    method: str = Field(description="How the principal was identified.")
    address: str | None = Field(description="Of the connection: of a proxy, if there is one.")
    action: str
    target: str | None = Field(description="Key, ids or version; null: the whole pool.")
    author: str | None = Field(description="As the request claims, if it is not the principal.")
    digest_before: str | None = Field(description="SHA-256 of the document that was active.")
    digest_after: str | None
    status: int | None = Field(description="Of the answer; null while the outcome is unknown.")
    outcome: Outcome

    @classmethod
    def of(cls, record: AuditRecord) -> Entry:
        values = asdict(record)
        return cls(at=values.pop("at_ms") / 1000, **values)


class Audit(BaseModel):
    """A page of the records, the newest first."""

    pool: str
    total: int = Field(description="How many records match.")
    next: str | None = Field(description="`before=` of the next page; null on the last one.")
    entries: list[Entry]


_Seconds = Annotated[float | None, Query(ge=0, le=1e11, description="Seconds since the epoch.")]
_Text = Annotated[str | None, Query(min_length=1, max_length=1_000)]


def audit_routes(inspector: AuditInspector, pool: str) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/audit", summary="Changes through the API, the newest first")
    async def audit(
        since: _Seconds = None,
        until: _Seconds = None,
        principal: _Text = None,
        action: _Text = None,
        before: _Text = None,
        limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    ) -> Audit:
        try:
            cursor = None if before is None else parse_cursor(before)
        except ValueError:
            raise HTTPException(
                HTTPStatus.BAD_REQUEST, "Invalid `before` cursor; omit it to start at the first page."
            ) from None
        query = AuditQuery(since=since, until=until, principal=principal, action=action, before=cursor, limit=limit)
        page = await inspector.audit(query)
        entries = [Entry.of(record) for record in page.records]
        return Audit(pool=pool, total=page.total, next=page.following, entries=entries)

    return router

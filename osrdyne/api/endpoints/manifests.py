"""The manifests of a pool over HTTP: `/v1/routes`, `/v1/splitter`, `/v1/profiles`, `/v1/policies`, `/v1/quota` and
`/v1/circuits/config`; the policy of a key, and `/v1/explain`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, FiniteFloat
from starlette.exceptions import HTTPException

from osrdyne.aio.tasks import SMALL, off_loop
from osrdyne.api.access.checks import Author, protected, require, require_protected
from osrdyne.api.bodies import document_text
from osrdyne.api.endpoints.quota import QuotaUsage, shown_usage
from osrdyne.api.keys import query_key
from osrdyne.api.problems import invalid_document
from osrdyne.auth.grants import Grant
from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.explain import Explanation
from osrdyne.ingress.policies.policy import Origin
from osrdyne.ingress.policies.table import shown
from osrdyne.ingress.requests import SystemName, sample_arrival
from osrdyne.pool.routing.manifest_store import KeptManifest, ManifestChange, ManifestKind
from osrdyne.pool.routing.profiles import ProfileChange
from osrdyne.pool.routing.routes import RouteChange
from osrdyne.pool.views import ManifestInspector
from osrdyne.protocol.names import Key, parse_key

_Version = Annotated[int, Query(ge=1)]
_IfMatch = Annotated[
    str | None,
    Header(description='The version that must be active, as `"3"`; `"0"`: there must never have been one.'),
]
_ETAG = re.compile(r'(?:"([0-9]{1,15})"|([0-9]{1,15}))', re.ASCII)
_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}


class Version(BaseModel):
    """One version of a manifest."""

    version: int
    author: str
    at: float = Field(description="When it became active, seconds since the epoch.")
    size: int | None = Field(
        None, description="The number of its routes, rules, profiles or policies; null if unknown."
    )
    manifest: dict[str, Any] | None = Field(
        None, description="The document; null for a version without one, and with `manifests=false`."
    )


class ActiveDocument(BaseModel):
    """The active manifest; null if there is none."""

    pool: str
    version: int = Field(description="Of the latest change; 0 if there has never been one.")
    current: Version | None


class ActiveQuota(ActiveDocument):
    """The active document of quotas, and the usage."""

    usage: QuotaUsage | None = Field(description="Null without quotas.")


class History(BaseModel):
    """The stored versions, the newest first."""

    pool: str
    versions: list[Version]


class Change(BaseModel):
    """The result of a change."""

    pool: str
    version: int
    warnings: list[str]

    @classmethod
    def of(cls, pool: str, change: ManifestChange) -> Self:
        return cls(pool=pool, version=change.kept.version, warnings=[str(warning) for warning in change.warnings])


class ChangedProfiles(Change):
    """The result of a change of the profiles."""

    changed_groups: int = Field(0, description="Groups whose workers are replaced, because their settings change.")

    @classmethod
    def of(cls, pool: str, change: ManifestChange) -> Self:
        changed = Change.of(pool, change)
        number = len(change.changed) if isinstance(change, ProfileChange) else 0
        return cls(**changed.model_dump(), changed_groups=number)


class ChangedRoutes(Change):
    """The result of a change of the routes. Requests of a priority that was removed keep it and are served."""

    added_priorities: list[int] = []
    removed_priorities: list[int] = []
    pending: dict[int, int] = Field(
        {}, description="Requests in queues of priorities that no route uses, by priority. They are served."
    )

    @classmethod
    def of(cls, pool: str, change: ManifestChange) -> Self:
        changed = super().of(pool, change)
        if isinstance(change, RouteChange):
            changed.added_priorities, changed.removed_priorities = list(change.added), list(change.removed)
            changed.pending = dict(change.pending)
        return changed


class PolicyElement(BaseModel):
    """One element of a policy."""

    value: Any
    origin: Origin
    acts: bool = Field(description="Whether this pool enforces it.")


class KeyPolicy(BaseModel):
    """The policy of a key."""

    pool: str
    key: str
    match: str | None = Field(description="The pattern of the policy; null: the default, or none.")
    elements: dict[str, PolicyElement] | None = Field(description="By name; null where no policy acts on the key.")


class Sample(BaseModel):
    """A request to be explained. It is not sent."""

    key: str
    path: str = ""
    headers: dict[str, str | int | FiniteFloat | bool | None] = {}
    body: Any = Field(None, description="JSON; null is no body.")
    content_type: str | None = Field(
        None,
        description="Without it and `content_encoding`: application/json in utf-8; with one, the other is missing.",
    )
    content_encoding: str | None = Field(None, description="As `content_type`; empty text: the request has none.")
    system: dict[SystemName, str] = Field({}, description="Further system properties that the publisher sets.")
    app_id: str | None = None
    principal: str | None = Field(
        None, max_length=200, description="Owner of the token of the request, with the grant `send` for all keys."
    )
    timeout: FiniteFloat | None = Field(None, gt=0, le=1e11, description="The caller's own limit, seconds.")


def manifest_routes(inspector: ManifestInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")
    _add_kind(router, inspector, ManifestKind.ROUTES, "route manifest", ChangedRoutes)
    _add_kind(router, inspector, ManifestKind.SPLITTER, "splitter manifest", Change)
    _add_kind(router, inspector, ManifestKind.PROFILES, "document of profiles", ChangedProfiles)

    _add_kind(router, inspector, ManifestKind.POLICIES, "document of queue policies", Change)
    _add_kind(router, inspector, ManifestKind.CIRCUITS, "configuration of the circuits", Change)

    _add_kind(
        router,
        inspector,
        ManifestKind.QUOTA,
        "document of quotas, and the usage",
        Change,
        active=ActiveQuota,
        more=lambda: {"usage": None if (usage := inspector.quota_usage()) is None else shown_usage(usage)},
    )

    @router.get(
        "/policies/effective",
        summary="The queue policy of a key, with the origin of each value",
        dependencies=[protected(inspector, query_key)],
    )
    async def effective_policy(key: Annotated[Key, Depends(query_key)]) -> KeyPolicy:
        found = await inspector.effective_policy(key)
        elements = None if found is None else shown(found.policy)
        match = None if found is None else found.match
        return KeyPolicy.model_validate({"pool": inspector.pool, "key": key, "match": match, "elements": elements})

    @router.post("/explain", summary="What would happen to a request, and why", response_class=JSONResponse)
    async def explain(request: Request, sample: Sample) -> Response:
        require(request, Grant.VIEW, sample.key)
        with suppress(InvalidKeyError):  # no policy acts on an invalid key
            require_protected(request, inspector, [parse_key(sample.key)])
        arrival = sample_arrival(
            sample.key,
            sample.path,
            headers=sample.headers,
            body=None if sample.body is None else json.dumps(sample.body).encode(),
            app_id=sample.app_id,
            timeout=sample.timeout,
            principal=sample.principal,
            content_type=sample.content_type,
            content_encoding=sample.content_encoding,
            system=sample.system,
            now=time.time(),
        )
        explanation: Explanation = await inspector.explain(arrival)
        # ASCII only: the explanation quotes the sample, which may hold half of a surrogate pair.
        size = len(explanation.routes) * SMALL // 100
        return _json(await off_loop(size, lambda: json.dumps(explanation.to_json())))

    return router


def _add_kind(
    router: APIRouter,
    inspector: ManifestInspector,
    kind: ManifestKind,
    name: str,
    answer: type[Change],
    *,
    active: type[ActiveDocument] = ActiveDocument,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """The paths of one kind of manifest. Documents stay text, so that a large one is not parsed on the loop.

    `more`: further members of the answer with the active manifest.
    """

    @router.get(f"/{kind.path}", summary=f"The active {name}", response_model=active)
    async def current() -> Response:
        kept = await inspector.current_manifest(kind)
        version = 0 if kept is None else kept.version
        shown = "null" if kept is None or kept.stored is None else await _shown([kept])
        pool = json.dumps(inspector.pool)
        rest = "".join(f", {json.dumps(member)}: {json.dumps(value)}" for member, value in more().items())
        return _json(f'{{"pool": {pool}, "version": {version}, "current": {shown}{rest}}}', etag=version)

    @router.put(f"/{kind.path}", summary=f"Make a {name} the active one", response_model=answer, openapi_extra=_BODY)
    async def change(request: Request, author: Author, if_match: _IfMatch = None) -> Change | Response:
        expected = _expected(if_match)
        try:
            text = document_text(await request.body())
            changed = await inspector.change_manifest(kind, text, author=author, expected=expected)
        except InvalidDocumentError as error:
            return invalid_document(error, check=f"{kind.command} check")
        return answer.of(inspector.pool, changed)

    @router.delete(f"/{kind.path}", summary=f"Remove the active {name}", response_model=answer)
    async def clear(author: Author, if_match: _IfMatch = None) -> Change:
        changed = await inspector.clear_manifest(kind, author=author, expected=_expected(if_match))
        return answer.of(inspector.pool, changed)

    @router.get(f"/{kind.path}/history", summary=f"The versions of the {name}, newest first", response_model=History)
    async def history(
        manifests: Annotated[bool, Query(description="Whether each version comes with its document.")] = True,
    ) -> Response:
        versions = await inspector.manifests(kind)
        shown = await _shown(versions, documents=manifests)
        return _json(f'{{"pool": {json.dumps(inspector.pool)}, "versions": [{shown}]}}')

    @router.post(f"/{kind.path}/rollback", summary="Make an earlier version active again", response_model=answer)
    async def rollback(version: _Version, author: Author, if_match: _IfMatch = None) -> Change:
        changed = await inspector.restore_manifest(kind, version, author=author, expected=_expected(if_match))
        return answer.of(inspector.pool, changed)


def _json(text: str, *, etag: int | None = None) -> Response:
    answer = Response(text, media_type="application/json")
    if etag is not None:
        answer.headers["etag"] = f'"{etag}"'
    return answer


def _expected(if_match: str | None) -> int | None:
    if if_match is None:
        return None
    found = _ETAG.fullmatch(if_match.strip())
    if found is None:
        raise HTTPException(HTTPStatus.BAD_REQUEST, 'If-Match must be one version, as "3".')
    return int(found[1] or found[2])


async def _shown(versions: Sequence[KeptManifest], *, documents: bool = True) -> str:
    size = sum(len(kept.stored or "") for kept in versions) if documents else 0
    return await off_loop(size, lambda: ", ".join(_version(kept, document=documents) for kept in versions))


def _version(kept: KeptManifest, *, document: bool) -> str:
    facts = {"version": kept.version, "author": kept.author, "at": kept.at, "size": kept.size}
    shown = json.dumps(facts)
    return f'{shown[:-1]}, "manifest": {_document(kept) if document else "null"}}}'


def _document(kept: KeptManifest) -> str:
    """The stored text. The text of another program is checked, because invalid JSON would break the whole answer."""
    try:
        text = kept.manifest
        if text is not None and not kept.packed:
            json.loads(text)
    except (ValueError, RecursionError):
        text = None
    return "null" if text is None else text

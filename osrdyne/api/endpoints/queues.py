"""The queues of keys over HTTP: `/v1/queues`, and `/v1/queue?key=` for one, which takes every key.

The registry is JSON, or an Atom feed (RFC 4287, paged as in RFC 5005) where the client accepts that. It lists the
queues that the sender may discover. One queue is JSON or an Atom entry, in requests and in answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Self
from urllib.parse import quote
from xml.etree import ElementTree as xml

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, Field

from osrdyne.aio.tasks import off_loop
from osrdyne.api.access.checks import Author, principal_of, protected
from osrdyne.api.bodies import document_text
from osrdyne.api.keys import key_schema, query_key
from osrdyne.api.problems import invalid_document
from osrdyne.auth.grants import Grant, Principal
from osrdyne.errors import LeadershipLostError, NoSuchQueueError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.policies.atom import ADDRESSING, ATOM, ATOM_TYPE, CONNECT, entry_json, policy_element, xml_text
from osrdyne.ingress.policies.authorization import Claim, may_discover
from osrdyne.ingress.policies.lifetimes import instant_text
from osrdyne.ingress.policies.policy import Discoverability, Origin
from osrdyne.ingress.policies.table import FoundPolicy, shown
from osrdyne.pool.views import PoolInspector, RegisteredQueue
from osrdyne.protocol.names import Key

MAX_PAGE = 500
for _prefix, _namespace in (("", ATOM), ("connect", CONNECT), ("wsa", ADDRESSING)):
    xml.register_namespace(_prefix, _namespace)
_GRANTS = {Claim.MANAGE: Grant.OPERATE, Claim.LISTEN: Grant.LISTEN, Claim.SEND: Grant.SEND}

_Requested = Annotated[Key, Depends(query_key)]
_KEY = key_schema("query")
_BODY: dict[str, Any] = {
    **_KEY,
    "requestBody": {
        "required": False,
        "content": {"application/json": {"schema": {"type": "object"}}, ATOM_TYPE: {"schema": {"type": "string"}}},
    },
}
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"content": {ATOM_TYPE: {}}}}


class QueueElement(BaseModel):
    """One element of the effective policy."""

    value: Any
    origin: Origin
    acts: bool = Field(description="Always true: the pool enforces every element.")


class Queue(BaseModel):
    """The queue of a key."""

    key: str
    queue: str = Field(description="Its name in RabbitMQ.")
    exists: bool = Field(description="Whether RabbitMQ has it now; a created queue is declared at the first request.")
    created: bool = Field(description="Whether it was created here; otherwise it was declared for a request.")
    state: str | None = Field(description="`alive` or `ending`; null for a queue that was not created here.")
    reason: str | None = Field(description="Why it ends: `deleted` or `expired`.")
    author: str | None
    created_at: float | None = Field(description="Seconds since the epoch.")
    expires_at: float | None = Field(description="Seconds since the epoch.")
    proposal: dict[str, Any] | None = Field(description="The elements as proposed.")
    links: dict[str, str] = Field(
        description="`self`: this queue; `alternate`: its group; `queuehead`: the queue in RabbitMQ."
    )
    policy: str | None = Field(description="The policy that acts on the key; null: none.")
    elements: dict[str, QueueElement] | None = Field(description="The effective policy, by the name of the element.")

    @classmethod
    def of(cls, found: RegisteredQueue) -> Self:
        record = found.record
        return cls.model_validate(
            {
                "key": found.key,
                "queue": found.queue,
                "exists": found.exists,
                "created": record is not None,
                "state": None if record is None else record.state.value,
                "reason": None if record is None or record.reason is None else record.reason.value,
                "author": None if record is None else record.author,
                "created_at": None if record is None else record.created_at,
                "expires_at": None if record is None else record.expires_at,
                "proposal": None if record is None else dict(record.proposal),
                "links": _links_of(found),
                "policy": None if found.policy is None else found.policy.name,
                "elements": None if found.policy is None else shown(found.policy.policy),
            }
        )


class Queues(BaseModel):
    """One page of the registry."""

    pool: str
    queues: list[Queue]
    next: str | None = Field(
        description="The path of the next page; null on the last one. A page may have fewer queues than the limit, or"
        " none, while more follow."
    )


def queue_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")
    of_one_key = [protected(inspector, query_key)]

    @router.get(
        "/queues",
        summary="The registry: the queues that the sender may discover",
        response_model=Queues,
        responses=_ANSWERS,
    )
    async def registry(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        after: Annotated[str | None, Query(description="The last key of the page before.")] = None,
    ) -> Response | Queues:
        _require_leading(request, inspector)
        principal = principal_of(request)
        page = await inspector.queues(
            after=None if after is None else Key(after),
            limit=limit,
            is_visible=lambda key, policy: _may_discover(principal, key, policy),
        )
        following = None if page.following is None else _page(limit, page.following)
        if _accepts_atom(request):
            feed = _feed(inspector.pool, page.queues, own=_page(limit, after), following=following)
            return Response(feed, media_type=f"{ATOM_TYPE};type=feed")
        return Queues(pool=inspector.pool, queues=[Queue.of(one) for one in page.queues], next=following)

    @router.post(
        "/queues",
        summary="Create the queue of a key, with a proposal of a policy",
        status_code=HTTPStatus.CREATED,
        response_model=Queue,
        openapi_extra=_BODY,
        dependencies=of_one_key,
    )
    async def create(request: Request, response: Response, key: _Requested, author: Author) -> Queue | Response:
        try:
            proposal = await _proposal(request) or "{}"
            found = await inspector.create_queue(key, proposal, author=author)
        except InvalidDocumentError as error:
            return invalid_document(error, check="osrdyne policies check")
        shown = _shown(request, inspector.pool, found, HTTPStatus.CREATED)
        (shown if isinstance(shown, Response) else response).headers["location"] = _self(found.key)
        return shown

    @router.get(
        "/queue",
        summary="The queue of one key",
        response_model=Queue,
        responses=_ANSWERS,
        openapi_extra=_KEY,
        dependencies=of_one_key,
    )
    async def one(request: Request, key: _Requested) -> Queue | Response:
        _require_leading(request, inspector)
        found = await inspector.queue(key)
        if not _may_discover(principal_of(request), found.key, found.policy):
            # The answer for a queue that does not exist: any other would reveal that this one does.
            raise NoSuchQueueError("This key has no queue, and none was created for it.")
        return _shown(request, inspector.pool, found)

    @router.put(
        "/queue",
        summary="Renew the queue of a key, with a new proposal or, without a body, with the current one",
        response_model=Queue,
        responses=_ANSWERS,
        openapi_extra=_BODY,
        dependencies=of_one_key,
    )
    async def renew(request: Request, key: _Requested, author: Author) -> Queue | Response:
        try:
            found = await inspector.renew_queue(key, await _proposal(request), author=author)
        except InvalidDocumentError as error:
            return invalid_document(error, check="osrdyne policies check")
        return _shown(request, inspector.pool, found)

    @router.delete(
        "/queue",
        summary="Remove the queue of a key; its waiting requests are answered `gone`",
        status_code=HTTPStatus.ACCEPTED,
        openapi_extra=_KEY,
        dependencies=of_one_key,
    )
    async def remove(key: _Requested, author: Author) -> Queue:
        return Queue.of(await inspector.remove_queue(key, author=author))

    return router


def _require_leading(request: Request, inspector: PoolInspector) -> None:
    """Raises `LeadershipLostError` on a standby for senders without any grant: they must neither learn the address of
    the leader nor cause queries for it."""
    if not principal_of(request).grants and not inspector.leadership().leading:
        raise LeadershipLostError("This daemon does not lead the pool.")


def _may_discover(principal: Principal, key: Key, policy: FoundPolicy | None) -> bool:
    claims = {claim for claim, grant in _GRANTS.items() if principal.may(grant, key)}
    discoverability = Discoverability.MANAGERS if policy is None else policy.policy.discoverability
    return may_discover(discoverability, claims)


async def _proposal(request: Request) -> str | None:
    """The proposal in the body, as JSON; None without one. Raises `InvalidDocumentError`."""
    body = await request.body()
    text = document_text(body).strip()
    return (await off_loop(len(body), entry_json, text) if _sends_atom(request) else text) if text else None


def _sends_atom(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == ATOM_TYPE


def _accepts_atom(request: Request) -> bool:
    """Whether the client prefers Atom. One that sends Atom and names neither format gets Atom, as in seed 003."""
    accepted = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")]
    json = accepted.index("application/json") if "application/json" in accepted else len(accepted)
    return accepted.index(ATOM_TYPE) < json if ATOM_TYPE in accepted else json == len(accepted) and _sends_atom(request)


def _shown(request: Request, pool: str, queue: RegisteredQueue, status: HTTPStatus = HTTPStatus.OK) -> Queue | Response:
    """The queue in the format that the client prefers."""
    if not _accepts_atom(request):
        return Queue.of(queue)
    content = _document(_entry(pool, queue))
    return Response(content, status, media_type=f"{ATOM_TYPE};type=entry;charset=utf-8")


def _self(key: Key) -> str:
    return f"/v1/queue?key={quote(key, safe='')}"


def _links_of(queue: RegisteredQueue) -> dict[str, str]:
    return {
        "self": _self(queue.key),
        "alternate": f"/v1/group?key={quote(queue.key, safe='')}",
        "queuehead": f"amqp:/queues/{quote(queue.queue, safe='')}",
    }


def _page(limit: int, after: str | None) -> str:
    return f"/v1/queues?limit={limit}" + ("" if after is None else f"&after={quote(after, safe='')}")


def _feed(pool: str, queues: Sequence[RegisteredQueue], *, own: str, following: str | None) -> bytes:
    feed = xml.Element(f"{{{ATOM}}}feed")
    updated = max((one.record.renewed_at for one in queues if one.record is not None), default=0.0)
    _add(feed, "id", f"urn:osrdyne:{pool}:queues")
    _add(feed, "title", f"Queues of the pool {pool}")
    _add(feed, "updated", instant_text(updated))
    _add(xml.SubElement(feed, f"{{{ATOM}}}author"), "name", "osrdyne")
    _links(feed, [("self", own), *([("next", following)] if following is not None else [])])
    feed.extend(_entry(pool, one) for one in queues)
    return _document(feed)


def _entry(pool: str, queue: RegisteredQueue) -> xml.Element:
    """A key may hold characters that XML cannot: links and ids are percent-encoded, in titles they are replaced."""
    entry = xml.Element(f"{{{ATOM}}}entry")
    _add(entry, "id", f"urn:osrdyne:{pool}:queue:{quote(queue.key, safe='')}")
    _add(entry, "title", queue.key)
    _add(entry, "updated", instant_text(0.0 if queue.record is None else queue.record.renewed_at))
    _links(entry, _links_of(queue).items())
    if queue.policy is not None:
        entry.append(policy_element(queue.policy.policy))
    return entry


def _document(root: xml.Element) -> bytes:
    content: bytes = xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return content


def _add(parent: xml.Element, name: str, text: str) -> None:
    xml.SubElement(parent, f"{{{ATOM}}}{name}").text = xml_text(text)


def _links(parent: xml.Element, links: Iterable[tuple[str, str]]) -> None:
    for relation, address in links:
        xml.SubElement(parent, f"{{{ATOM}}}link", {"rel": relation, "href": address})

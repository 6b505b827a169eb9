"""Read the body of a request before the application, within limits of size and time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from osrdyne.api.problems import problem
from osrdyne.config.types import size_text
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.pool.routing.manifest_store import ManifestKind

LARGE_AT_ONCE = 2  # Manifests that are read at the same time; further ones wait in their sockets.

_MANIFESTS = frozenset(f"/v1/{kind.path}" for kind in ManifestKind)


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The largest body, the largest manifest (bytes), and the time in which a body must arrive (seconds)."""

    body: int = 2**20
    manifest: int = 16 * 2**20
    timeout: float = 60.0


class BodyReader:
    """Reads bodies within `limits`."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def read(self, scope: Scope, receive: Receive) -> bytes | JSONResponse:
        """The body, or the answer to a request whose body is refused. Raises `ClientGoneError`."""
        headers = Headers(scope=scope)
        is_manifest = scope["method"] == "PUT" and scope["path"] in _MANIFESTS
        limit = self._limits.manifest if is_manifest else self._limits.body
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            return _too_large(limit)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            return b""
        if not is_manifest:
            return await self._read(receive, limit)
        async with self._large:
            return await self._read(receive, limit)

    async def _read(self, receive: Receive, limit: int) -> bytes | JSONResponse:
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > limit:
                        return _too_large(limit)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            return _closing(
                problem(
                    HTTPStatus.REQUEST_TIMEOUT,
                    code="request-timeout",
                    detail=f"The body did not arrive within {self._limits.timeout:g} seconds.",
                )
            )


def document_text(body: bytes) -> str:
    """The text of a document in a body. Raises `InvalidDocumentError` if it is not UTF-8."""
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise InvalidDocumentError([Problem("this is not UTF-8", line=line)]) from None


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` for the application: first the whole body, then the messages after it."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _too_large(limit: int) -> JSONResponse:
    return _closing(
        problem(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            code="body-too-large",
            detail=f"The body is larger than {size_text(limit)}.",
            remedy="Send a smaller one, or raise api.max_body, for documents of manifests api.max_manifest.",
            limit=limit,
        )
    )


def _closing(answer: JSONResponse) -> JSONResponse:
    """Close the connection after the answer: the rest of the body is not read, so no other request can follow."""
    answer.headers["connection"] = "close"
    return answer

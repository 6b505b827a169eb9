"""Errors as `application/problem+json` (RFC 9457): what is wrong, a code for programs, and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from osrdyne.errors import (
    BrokerError,
    BrokerUnavailableError,
    DriverError,
    InvalidKeyError,
    LastValueStoreError,
    LeadershipLostError,
    NoSuchQueueError,
    OsrdyneError,
    PoisonNotFoundError,
    PoolConflictError,
    UnprotectedTransportError,
    VersionConflictError,
)
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.logs import mask_uri

CONTENT_TYPE = "application/problem+json"

_ANSWERS: Sequence[tuple[type[OsrdyneError], HTTPStatus, str, str | None]] = (
    (InvalidKeyError, HTTPStatus.BAD_REQUEST, "invalid-key", "Send a UTF-8 key of at most 255 bytes, percent-encoded."),
    (PoisonNotFoundError, HTTPStatus.NOT_FOUND, "not-found", "`osrdyne poison list` shows the entries."),
    (NoSuchQueueError, HTTPStatus.NOT_FOUND, "not-found", "`osrdyne queues list` shows the queues."),
    (PoolConflictError, HTTPStatus.CONFLICT, "conflict", None),  # the message names the remedy
    (
        UnprotectedTransportError,
        HTTPStatus.FORBIDDEN,
        "tls-required",
        "Use https (api.tls), a proxy of api.trusted_proxies or the Unix socket, or set TransportProtection to None.",
    ),
    (
        LeadershipLostError,
        HTTPStatus.SERVICE_UNAVAILABLE,
        "not-leading",
        "`osrdyne status` shows the reason. Try again when a daemon leads.",
    ),
    (BrokerUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE, "broker-unavailable", "See /ready, and try again later."),
    (BrokerError, HTTPStatus.BAD_GATEWAY, "broker-error", "Run `osrdyne doctor` with the daemon's configuration."),
    (
        LastValueStoreError,
        HTTPStatus.SERVICE_UNAVAILABLE,
        "last-values-unavailable",
        None,  # the message names the remedy
    ),
    (DriverError, HTTPStatus.BAD_GATEWAY, "driver-error", "Run `osrdyne doctor` with the daemon's configuration."),
)


class NotFoundError(HTTPException):
    """Something that a path names does not exist. `remedy`: a sentence, such as the command that lists what does."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(HTTPStatus.NOT_FOUND, detail)
        self.remedy = remedy


NO_SUCH_PATH = NotFoundError("There is no such path.", "/openapi.json lists the paths.")


def not_leading(leader: str | None) -> LeadershipLostError:
    """The error of a standby. `leader`: the address of the daemon that leads, if one is known."""
    if leader is None:
        return LeadershipLostError("No daemon is known to lead the pool at the moment.")
    return LeadershipLostError("This daemon is on standby.", leader=leader)


def problem(status: HTTPStatus, *, code: str, detail: str, remedy: str | None = None, **more: object) -> JSONResponse:
    """An error answer. `detail`: a sentence, in which passwords are masked again."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": status.phrase,
        "status": int(status),
        "detail": mask_uri(detail),
        "code": code,
        **more,
    }
    if remedy is not None:
        body["remedy"] = remedy
    return JSONResponse(body, status_code=status, media_type=CONTENT_TYPE)


def invalid_document(error: InvalidDocumentError, *, check: str) -> JSONResponse:
    """The answer to a document with errors. `check`: the command that reports them without a daemon."""
    found = [
        {"path": one.path, "line": one.line, "column": one.column, "message": one.message} for one in error.problems
    ]
    return problem(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        code="invalid-document",
        detail=error.message,
        remedy=f"`{check}` reports the same errors without a daemon.",
        problems=found,
    )


def problem_of(error: OsrdyneError) -> JSONResponse:
    """The answer to an error of osrdyne."""
    leader = error.fields.get("leader")
    if isinstance(error, LeadershipLostError) and isinstance(leader, str):
        return problem(
            HTTPStatus.MISDIRECTED_REQUEST,
            code="not-leading",
            detail=error.message,
            remedy=f"Ask the daemon at {leader}.",
            leader=leader,
        )
    if isinstance(error, InvalidDocumentError):
        return invalid_document(error, check="osrdyne routes check")
    if isinstance(error, VersionConflictError):
        return problem(
            HTTPStatus.PRECONDITION_FAILED,
            code="version-conflict",
            detail=error.message,
            remedy="Review the other change, and make yours again.",
            version=error.fields.get("version"),
        )
    for kind, status, code, remedy in _ANSWERS:
        if isinstance(error, kind):
            return problem(status, code=code, detail=error.message, remedy=remedy)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, code="error", detail=error.message)

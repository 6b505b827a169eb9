"""One request as routes and the splitter read it. Built from a delivery of the ingress or a sample of `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal
from urllib.parse import quote

from osrdyne.auth.decision import AccessRefusal
from osrdyne.auth.grants import ALL_KEYS, Grant, Principal
from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.conditions import Sample
from osrdyne.protocol.messages import JSON_TYPE, PATH_HEADER, Request, request_from_wire, without_identity
from osrdyne.protocol.names import parse_key
from osrdyne.protocol.statuses import decode_text

OUTPUT_HEADER = "x-output"
SystemName = Literal["messageId", "correlationId", "userId", "enqueuedTime", "messageType"]
"""The system properties that a publisher sets, and that no other argument of `sample_arrival` holds."""


@dataclass(frozen=True)
class Arrival:
    """A request at the ingress, with the properties of the message that `Request` does not hold.

    `accepted_ms`: milliseconds since the epoch, the beginning of its time-to-live. `enqueued_time`: the timestamp of
    the message as ISO 8601. `split_from`: the client's key if the splitter changed it. `identity`: the owner of the
    presented token, or why it is refused. `principal`: the name of the sender for routes, quotas and workers.
    """

    request: Request
    accepted_ms: int
    app_id: str | None = None
    message_id: str | None = None
    user_id: str | None = None
    message_type: str | None = None
    enqueued_time: str | None = None
    split_from: str | None = None
    identity: Principal | AccessRefusal = AccessRefusal.NO_TOKEN
    principal: str | None = None

    def identified(self, identity: Principal | AccessRefusal) -> Arrival:
        """The same request with the result of verifying its token."""
        return replace(self, identity=identity, principal=identity.name if isinstance(identity, Principal) else None)

    def check_key(self) -> None:
        """Raises `InvalidKeyError`; its message names the splitter if the splitter made the key."""
        try:
            parse_key(self.request.key)
        except InvalidKeyError as error:
            if self.split_from is None:
                raise
            raise InvalidKeyError(f"After the splitter: {error} `osrdyne explain` names the rule.") from None

    @property
    def output(self) -> str:
        """Header `x-output`, else the path without its slash."""
        return decode_text(self.request.headers.get(OUTPUT_HEADER)) or self.request.path.removeprefix("/")

    @property
    def source(self) -> str:
        """The path that sources of routes match: `/messages/modules/{app}/outputs/{output}`, without unknown parts."""
        if not self.app_id:
            return "/messages"
        return f"/messages/modules/{self.app_id}" + (f"/outputs/{self.output}" if self.output else "")

    @cached_property
    def sample(self) -> Sample:
        """The request as conditions read it."""
        request, path = self.request, self.request.path.removeprefix("/")
        system = {
            "messageId": self.message_id,
            "correlationId": request.correlation_id,
            "userId": self.user_id,
            "contentType": request.content_type,
            "contentEncoding": request.content_encoding,
            "connectionModuleId": self.app_id,
            "enqueuedTime": self.enqueued_time,
            "to": f"/modules/{_quoted(request.key)}/inputs/{path}",
            "inputName": path,
            "outputName": self.output,
            "messageType": self.message_type,
            "deliveryCount": str(request.delivery_count),
            "key": request.key,
            "principal": self.principal,
        }
        # A property that the publisher has not set is undefined, so it is left out: None would be null.
        return Sample(
            request.headers, {name: value for name, value in system.items() if value is not None}, request.body
        )


@lru_cache(maxsize=1024)
def _quoted(key: str) -> str:
    """Quote a key. Cached, because quoting is the most expensive part of a sample and keys repeat; paths may be of any
    length, and would fill the cache."""
    return quote(key, safe="", errors="replace")


def sample_arrival(
    key: str,
    path: str,
    *,
    headers: Mapping[str, object],
    body: bytes | None,
    app_id: str | None,
    timeout: float | None,
    now: float,
    principal: str | None = None,
    content_type: str | None = None,
    content_encoding: str | None = None,
    system: Mapping[SystemName, str] | None = None,
) -> Arrival:
    """A sample request, published at `now` (seconds since the epoch). `timeout` in seconds. `principal`: the owner of
    its token, with the grant `send` for all keys. Without `content_type` and `content_encoding` a body is JSON in
    UTF-8, as the Python client sends it; with one of them the request has only that one. Empty text: it has none.

    Raises `InvalidKeyError`.
    """
    now_ms, system = round(now * 1000), system or {}
    if body and content_type is None and content_encoding is None:
        content_type, content_encoding = JSON_TYPE, "utf-8"
    request = request_from_wire(
        key=parse_key(key),
        body=body or b"",
        headers={**without_identity(headers), **({PATH_HEADER: path} if path else {})},
        correlation_id=system.get("correlationId"),
        reply_to=None,
        content_type=content_type or None,
        content_encoding=content_encoding or None,
        expiration=None if timeout is None else round(timeout * 1000),
        timestamp=None,
        redelivered=False,
        now_ms=now_ms,
    )
    arrival = Arrival(
        request,
        accepted_ms=now_ms,
        app_id=app_id,
        message_id=system.get("messageId"),
        user_id=system.get("userId"),
        message_type=system.get("messageType"),
        enqueued_time=system.get("enqueuedTime"),
    )
    return arrival if principal is None else arrival.identified(Principal(principal, {Grant.SEND: ALL_KEYS}))

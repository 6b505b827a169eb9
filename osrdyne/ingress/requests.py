"""What the decisions look at: one request as routes see it. Made from a delivery by the processor, or by `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from urllib.parse import quote

from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.conditions import Sample
from osrdyne.protocol.messages import JSON_TYPE, PATH_HEADER, Request, request_from_wire
from osrdyne.protocol.names import parse_key
from osrdyne.protocol.statuses import decode_text

OUTPUT_HEADER = "x-output"


@dataclass(frozen=True)
class Arrival:
    """A request at the ingress, with the properties of the message that `Request` does not hold.

    `split_from` is the key that the caller named, where the splitter has made another one of it.
    """

    request: Request
    accepted_ms: int
    app_id: str | None = None
    message_id: str | None = None
    user_id: str | None = None
    message_type: str | None = None
    enqueued_time: str | None = None
    split_from: str | None = None

    def check_key(self) -> None:
        """Raises `InvalidKeyError`, which says so when the splitter made the key."""
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
        """Where it comes from: `/messages/modules/{app}/outputs/{output}`, as far as that is known."""
        if not self.app_id:
            return "/messages"
        return f"/messages/modules/{self.app_id}" + (f"/outputs/{self.output}" if self.output else "")

    @cached_property
    def sample(self) -> Sample:
        """What conditions see."""
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
        }
        # What a publisher has not set is not there; none of them is null.
        return Sample(
            request.headers, {name: value for name, value in system.items() if value is not None}, request.body
        )


@lru_cache(maxsize=1024)
def _quoted(key: str) -> str:
    """Kept because quoting is the dearest part of a sample, and keys come again; paths may be of any length."""
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
) -> Arrival:
    """A request that a person made up, published at `now` (seconds since the epoch). A body is JSON.

    Raises `InvalidKeyError`.
    """
    now_ms = round(now * 1000)
    request = request_from_wire(
        key=parse_key(key),
        body=body or b"",
        headers={**headers, **({PATH_HEADER: path} if path else {})},
        correlation_id=None,
        reply_to=None,
        content_type=None if body is None else JSON_TYPE,
        content_encoding=None if body is None else "utf-8",
        expiration=None if timeout is None else round(timeout * 1000),
        timestamp=None,
        redelivered=False,
        now_ms=now_ms,
    )
    return Arrival(request, accepted_ms=now_ms, app_id=app_id)

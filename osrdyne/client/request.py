"""From the arguments of a call to the message on the wire. Pure; used by `aio` only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypedDict

from osrdyne.amqp import Message
from osrdyne.errors import InvalidMessageError
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import (
    ACCEPT_HEADER,
    JSON_TYPE,
    NO_ACTIVATE_HEADER,
    PATH_HEADER,
    WANTS_PROGRESS_HEADER,
    encode_path,
)
from osrdyne.protocol.names import Key, parse_key

DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"
"""RabbitMQ's pseudo-queue: answers come straight to the channel that published the request."""


class RequestOptions(TypedDict, total=False):
    """Keywords of every kind of request.

    - `timeout`: seconds; becomes the request's deadline, so that no worker starts it later. Default: the client's.
    - `answer_slack`: seconds to wait beyond that for the answer that it expired; 0 is a strict time-out. Default: the
      client's.
    - `headers`: further headers, `traceparent` for instance; workers may see them all.
    - `accept`: content type wanted for the answer.
    - `content_type`: of the body; JSON when the client encodes it, not stated when it is bytes.
    - `no_activate`: answer `not-running` instead of starting a worker.
    - `correlation_id`: instead of one of the client's own, to `cancel` the call by.
    """

    timeout: float | None
    answer_slack: float | None
    headers: Mapping[str, object] | None
    accept: str | None
    content_type: str | None
    no_activate: bool
    correlation_id: str | None


@dataclass(slots=True)
class OutgoingRequest:
    """A request ready to be published. `timeout` in seconds is what the caller grants, from now on, and `answer_slack`
    how much longer it waits for an answer.

    `sent` is set by the session just before the request may leave this process.
    """

    key: Key
    path: str
    correlation_id: str
    timeout: float
    answer_slack: float
    message: Message
    sent: bool = False


def build_request(
    key: str,
    path: str,
    body: object,
    *,
    correlation_id: str,
    timeout: float,
    now: float,
    app_id: str,
    user_id: str | None = None,
    answer_slack: float = 0.0,
    reply_to: str | None = DIRECT_REPLY_TO,
    has_deadline: bool = True,
    headers: Mapping[str, object] | None = None,
    accept: str | None = None,
    content_type: str | None = None,
    no_activate: bool = False,
    wants_progress: bool = False,
) -> OutgoingRequest:
    """Build a request at `now` (seconds since the epoch).

    Raises `InvalidKeyError` for a key that is none, `InvalidMessageError` for a body that JSON cannot express.

    The three fields of the deadline say the same: `timestamp` has whole seconds only, so `expiration` counts from
    there, and `timestamp` + `expiration` = `x-deadline` to the millisecond.
    """
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if not 0 <= answer_slack < math.inf:
        raise ValueError(f"answer_slack must be a number of seconds, 0 or more, not {answer_slack!r}")
    all_headers: dict[str, object] = dict(headers or {})
    if path:
        all_headers[PATH_HEADER] = encode_path(path)
    if accept is not None:
        all_headers[ACCEPT_HEADER] = accept
    if no_activate:
        all_headers[NO_ACTIVATE_HEADER] = True
    if wants_progress:
        all_headers[WANTS_PROGRESS_HEADER] = True
    seconds, expiration = int(now), None
    if has_deadline:
        deadline_ms = math.ceil((now + timeout) * 1000)
        all_headers[DEADLINE_HEADER] = deadline_ms
        expiration = str(deadline_ms - seconds * 1000)
    encoded, encoded_type = encode_body(body)
    message = Message(
        body=encoded,
        headers=all_headers,
        correlation_id=correlation_id,
        reply_to=reply_to,
        content_type=content_type or encoded_type,
        # Conditions of routes look into bodies that say both; JSON that is exchanged is UTF-8 (RFC 8259).
        content_encoding="utf-8" if (content_type or encoded_type) == JSON_TYPE else None,
        expiration=expiration,
        timestamp=datetime.fromtimestamp(seconds, tz=UTC),
        app_id=app_id,
        user_id=user_id,
    )
    return OutgoingRequest(parse_key(key), path, correlation_id, timeout, answer_slack, message)


def encode_body(body: object) -> tuple[bytes, str | None]:
    """Body and content type: bytes go as they are, None is no body, and everything else becomes JSON."""
    if body is None:
        return b"", None
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), None
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(), JSON_TYPE
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessageError(f"The body cannot be written as JSON: {error}.") from error

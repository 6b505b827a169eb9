"""Builds the AMQP message of a request from the arguments of a call. Pure; used by `aio` only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from numbers import Real
from typing import TypedDict

from osrdyne.amqp import Message
from osrdyne.errors import ConfigurationError, InvalidMessageError
from osrdyne.protocol.data_versions import DATA_VERSION_HEADER, check_data_version
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import (
    ACCEPT_HEADER,
    AUTHORIZATION_HEADER,
    JOB_PROGRESS_HEADER,
    JSON_TYPE,
    NO_ACTIVATE_HEADER,
    PATH_HEADER,
    WANTS_PROGRESS_HEADER,
    encode_path,
)
from osrdyne.protocol.names import DIRECT_REPLY_TO, Key, parse_key
from osrdyne.protocol.streams import CREDIT_HEADER

MAX_TOKEN = 8_192
"""Characters of a token; a pool refuses longer ones."""
MAX_TIMEOUT = 49 * 86_400.0
"""Seconds: RabbitMQ accepts no `expiration` of 2^32 ms or more."""


class RequestOptions(TypedDict, total=False):
    """Keywords of every kind of request.

    - `timeout`: seconds until the deadline, after which no worker begins the request. Default: the client's.
    - `answer_slack`: seconds to wait beyond that for the answer `expired`; 0 is a strict time-out. Default: the
      client's.
    - `headers`: further headers, `traceparent` for instance; workers may see them all.
    - `accept`: content type wanted for the answer.
    - `content_type`: of the body. Default: JSON if the client encodes the body, none if the body is bytes.
    - `no_activate`: answer `not-running` instead of starting a worker.
    - `data_version`: the lowest version of the data that may answer, an integer; the worker reloads older data first.
    - `correlation_id`: for `cancel`. Default: a unique one.
    - `message_id`: the same for each copy of a message, so that readers of the log of telemetry can recognise copies.
    - `token`: an API token or a JWT for this request, instead of the client's.
    """

    timeout: float | None
    answer_slack: float | None
    headers: Mapping[str, object] | None
    accept: str | None
    content_type: str | None
    no_activate: bool
    data_version: int | None
    correlation_id: str | None
    message_id: str | None
    token: str | None


@dataclass(slots=True)
class OutgoingRequest:
    """A request that is ready to be published. `timeout`: seconds until the deadline; `answer_slack`: how much longer
    the call waits for an answer. `sent`: set by the session just before it publishes the request."""

    key: Key
    path: str
    correlation_id: str
    timeout: float
    answer_slack: float
    message: Message
    sent: bool = False


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends a request. `user_id`: the user of the connection; `token`: an API token or a JWT."""

    app_id: str
    user_id: str | None = None
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """When a request is made (`now`, seconds since the epoch), and the seconds until its deadline. `answer_slack`: how
    much longer the call waits for the answer. Without `has_deadline` the pool decides how long the request may wait.
    Raises `ValueError` for impossible values, `TypeError` for what is no number."""

    now: float
    timeout: float
    answer_slack: float = 0.0
    has_deadline: bool = True

    def __post_init__(self) -> None:
        for name in ("timeout", "answer_slack"):
            if not isinstance(value := getattr(self, name), Real):
                raise TypeError(f"{name} must be a number of seconds, not {value!r}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        if self.has_deadline and self.timeout > MAX_TIMEOUT:
            raise ValueError(f"timeout must be at most {MAX_TIMEOUT:.0f} seconds (49 days), not {self.timeout!r}")
        if not 0 <= self.answer_slack < math.inf:
            raise ValueError(f"answer_slack must be a number of seconds, 0 or more, not {self.answer_slack!r}")


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    """The answer that a request asks for. `reply_to`: None for no answer. `credit`: of a streamed answer; None for an
    answer in one message."""

    reply_to: str | None = DIRECT_REPLY_TO
    wants_progress: bool = False
    wants_job_progress: bool = False
    credit: int | None = None


def build_request(
    key: str,
    path: str,
    body: object,
    *,
    correlation_id: str,
    times: CallTimes,
    sender: Sender,
    answer: WantedAnswer = WantedAnswer(),
    options: RequestOptions | None = None,
) -> OutgoingRequest:
    """Build a request. `options`: those about times and correlation id are ignored, because `times` and
    `correlation_id` have them.

    Raises `InvalidKeyError` for an invalid key, `InvalidMessageError` for a body that JSON cannot express,
    `ConfigurationError` for a malformed token, `TypeError` for a key or path that is not text, or an unknown option.

    The three fields of the deadline agree to the millisecond, although `timestamp` has whole seconds only: `expiration`
    counts from there, so that `timestamp` + `expiration` = `x-deadline`.
    """
    options = options or {}
    _check_types(key, path, options)
    headers: dict[str, object] = dict(options.get("headers") or {})
    token = sender.token if (own := options.get("token")) is None else own
    if token is not None:
        headers[AUTHORIZATION_HEADER] = f"Bearer {check_token(token)}"
    if path:
        headers[PATH_HEADER] = encode_path(path)
    if (accept := options.get("accept")) is not None:
        headers[ACCEPT_HEADER] = accept
    if options.get("no_activate", False):
        headers[NO_ACTIVATE_HEADER] = True
    if (data_version := options.get("data_version")) is not None:
        headers[DATA_VERSION_HEADER] = check_data_version(data_version)
    if answer.wants_progress:
        headers[WANTS_PROGRESS_HEADER] = True
    if answer.wants_job_progress:
        headers[JOB_PROGRESS_HEADER] = True
    if answer.credit is not None:
        headers[CREDIT_HEADER] = answer.credit
    seconds, expiration = int(times.now), None
    if times.has_deadline:
        deadline_ms = math.ceil((times.now + times.timeout) * 1000)
        headers[DEADLINE_HEADER] = deadline_ms
        expiration = str(deadline_ms - seconds * 1000)
    encoded, encoded_type = encode_body(body)
    content_type = options.get("content_type") or encoded_type
    message = Message(
        body=encoded,
        headers=headers,
        correlation_id=correlation_id,
        message_id=options.get("message_id"),
        reply_to=answer.reply_to,
        content_type=content_type,
        # Routes match on the body only if the message has both properties. JSON between systems is UTF-8 (RFC 8259).
        content_encoding="utf-8" if content_type == JSON_TYPE else None,
        expiration=expiration,
        timestamp=datetime.fromtimestamp(seconds, tz=UTC),
        app_id=sender.app_id,
        user_id=sender.user_id,
    )
    return OutgoingRequest(parse_key(key), path, correlation_id, times.timeout, times.answer_slack, message)


def _check_types(key: object, path: object, options: RequestOptions) -> None:
    """Raise `TypeError` for mistakes that a type checker would find. An option whose name is misspelled would otherwise
    have no effect."""
    if not isinstance(key, str):
        raise TypeError(f"the key must be text, not {key!r}")
    if path is not None and not isinstance(path, str):
        raise TypeError(f"the path must be text, not {path!r}")
    if unknown := options.keys() - RequestOptions.__optional_keys__:
        name = min(unknown)
        close = get_close_matches(name, RequestOptions.__optional_keys__, n=1)
        raise TypeError(f"unknown keyword {name!r}{f'; did you mean {close[0]!r}?' if close else ''}")


def check_token(token: str) -> str:
    """Return a valid token. Raises `ConfigurationError`, whose message does not contain the token."""
    if not 0 < len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(
            f"The token is empty, longer than {MAX_TOKEN} characters, or contains blanks or other invalid characters: "
            "give the text of an API token or of a JWT, without `Bearer`."
        )
    return token


def encode_body(body: object) -> tuple[bytes, str | None]:
    """Body and content type of a value: bytes are sent unchanged, None is an empty body, all else becomes JSON."""
    if body is None:
        return b"", None
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), None
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(), JSON_TYPE
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessageError(f"The body cannot be written as JSON: {error}.") from error

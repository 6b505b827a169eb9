"""One request as a handler sees it (`Call`), and its answer (`Answer`). No I/O: the runtime sends progress.

A `Call` may be used from any thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.protocol.messages import Request, without_credentials
from osrdyne.protocol.retries import read_attempts
from osrdyne_worker.app.app import Context
from osrdyne_worker.app.errors import CallCancelledError


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request, or one progress value.

    `body` is bytes, str, or any value that JSON can represent (pydantic models and dataclasses included). Without
    `content_type`, the type of the body decides. `code` is the HTTP-like `x-code`; `headers` are added to the reply. An
    answer with rows of an earlier time has their `x-data-version` in `headers`, None if unknown.
    """

    body: Any = None
    content_type: str | None = None
    code: int = 200
    headers: Mapping[str, object] = field(default_factory=dict)


class Call:
    """One request that a handler works on. Thread-safe."""

    __slots__ = (
        "_cancelled",
        "_clock",
        "_deadline_at",
        "_max_bytes",
        "_open_session",
        "_request",
        "_send_progress",
        "_session",
        "_session_lock",
        "_stream_bytes",
        "context",
    )

    def __init__(
        self,
        context: Context,
        request: Request,
        *,
        timeout: float = math.inf,
        clock: Clock | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.context = context
        self._max_bytes = max_bytes
        self._request = request
        self._clock = clock or SystemClock()
        self._deadline_at = self._clock.monotonic() + timeout
        self._send_progress: Callable[[Answer], None] | None = None
        self._cancelled = False
        self._open_session: Callable[[], Any] = lambda: context.session
        self._session: Any = None
        self._session_lock = threading.Lock()
        self._stream_bytes: int | None = None

    @property
    def session(self) -> Any:
        """The session of this request only. At its first use it gets the views, functions and settings of
        `context.session`; additions and changes by the request end with the request. All requests share
        `context.session`.

        None without a session factory. The first use makes a blocking call of about a millisecond.
        """
        with self._session_lock:
            if self._session is None:
                self._session = self._open_session()
            return self._session

    @property
    def path(self) -> str:
        """The `x-rpc-path` of the request, empty when it has none."""
        return self._request.path

    @property
    def headers(self) -> Mapping[str, object]:
        """The headers as sent by the caller (text, byte arrays, numbers, …), without `authorization`."""
        return without_credentials(self._request.headers)

    @property
    def principal(self) -> str | None:
        """Who sent the request: the name of the API token, or the `sub` of the JWT, that the ingress of a managed pool
        has verified. None without one; clients cannot forge it."""
        return self._request.principal

    @property
    def accept(self) -> str | None:
        """The content type that the caller accepts."""
        return self._request.accept

    @property
    def body(self) -> bytes:
        """The body as sent by the caller."""
        return self._request.body

    @property
    def content_type(self) -> str | None:
        return self._request.content_type

    @property
    def content_encoding(self) -> str | None:
        return self._request.content_encoding

    @property
    def correlation_id(self) -> str | None:
        return self._request.correlation_id

    @property
    def reply_to(self) -> str | None:
        """The queue or address for the reply."""
        return self._request.reply_to

    @property
    def redelivered(self) -> bool:
        """Whether a worker may have received the request before."""
        return self._request.redelivered

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1: the route of a request may retry it after some outcomes."""
        return read_attempts(self._request.headers) + 1

    @property
    def deadline(self) -> float:
        """Seconds left for this request; 0 after the deadline."""
        return max(0.0, self._deadline_at - self._clock.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether the caller no longer needs the answer: it cancelled the request, or the deadline passed."""
        return self._cancelled

    def cancel(self) -> None:
        """Mark the call as cancelled. Called by the runtime."""
        self._cancelled = True

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now. Called by the runtime."""
        self._deadline_at = self._clock.monotonic() + seconds

    def attach(self, send_progress: Callable[[Answer], None]) -> None:
        """Set the function that sends progress. Called by the runtime, if the client asks for progress."""
        self._send_progress = send_progress

    @property
    def max_bytes(self) -> int | None:
        """The largest body of an answer in one message, in bytes; None if unknown."""
        return self._max_bytes

    @property
    def stream_bytes(self) -> int | None:
        """The largest message of a streamed answer, in bytes; None if the answer to this call is one message."""
        return self._stream_bytes

    def attach_stream(self, max_bytes: int) -> None:
        """Let rows be streamed in messages of at most `max_bytes`. Called by the runtime, if the client asks for it."""
        self._stream_bytes = max_bytes

    def attach_session(self, open_session: Callable[[], Any]) -> None:
        """Set the function that opens the session of this request. Called by the runtime."""
        with self._session_lock:
            self._open_session = open_session
            # A handler that runs again, after a reload, must not read the views of its first run.
            self._session = None

    def raise_if_cancelled(self) -> None:
        """Raise `CallCancelledError` if the call is cancelled. For long loops in a plain function."""
        if self._cancelled:
            raise CallCancelledError("The request was cancelled or its deadline passed.")

    def progress(self, value: Any) -> None:
        """Send a non-terminating reply: an `Answer`, or a value that becomes one. May be called repeatedly.

        Nothing is sent to a client that does not ask for progress (`x-progress`). In a thread, the call waits until
        RabbitMQ has the reply, so that a fast producer cannot fill the memory. Raises `CallCancelledError`.
        """
        self.raise_if_cancelled()
        if self._send_progress is not None:
            self._send_progress(value if isinstance(value, Answer) else Answer(value))

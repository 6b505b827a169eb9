"""One request as a handler sees it: `Call`, `Answer`, `RequestError`.

Used by application authors and by the runtime. A `Call` may be used from any thread. Nothing here talks to a broker:
progress goes through a function that the runtime passes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.errors import OsrdyneError
from osrdyne.protocol.messages import Request, without_credentials
from osrdyne.protocol.retries import read_attempts
from osrdyne_worker.app.app import Context


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request, or one progress value.

    `body` is bytes, str, or anything that JSON can hold (pydantic models and dataclasses included). Without
    `content_type` it follows from the body. `code` is the HTTP-like `x-code`; `headers` are added to the reply.
    """

    body: Any = None
    content_type: str | None = None
    code: int = 200
    headers: Mapping[str, object] = field(default_factory=dict)


class RequestError(OsrdyneError):
    """The request is refused: the caller gets `error` with this message, and no traceback is logged.

    `code` is the HTTP-like number, `error_code` a word for programs, `details` further JSON facts for the caller.
    """

    def __init__(
        self,
        message: str,
        code: int = 400,
        error_code: str = "bad_request",
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, code=code, error_code=error_code)
        self.code = code
        self.error_code = error_code
        self.details = dict(details or {})


class CallCancelledError(OsrdyneError):
    """The caller cancelled the request, or its deadline passed; whoever works on it should stop."""


class Call:
    """One request in process. Thread-safe."""

    __slots__ = ("_cancelled", "_clock", "_deadline_at", "_request", "_send_progress", "context")

    def __init__(
        self,
        context: Context,
        request: Request,
        *,
        timeout: float = math.inf,
        clock: Clock | None = None,
    ) -> None:
        self.context = context
        self._request = request
        self._clock = clock or SystemClock()
        self._deadline_at = self._clock.monotonic() + timeout
        self._send_progress: Callable[[Answer], None] | None = None
        self._cancelled = False

    @property
    def path(self) -> str:
        """The `x-rpc-path` of the request, empty when it has none."""
        return self._request.path

    @property
    def headers(self) -> Mapping[str, object]:
        """The headers as they came: text, byte arrays, numbers, whatever the caller put there; no `authorization`."""
        return without_credentials(self._request.headers)

    @property
    def accept(self) -> str | None:
        """The content type the caller wants."""
        return self._request.accept

    @property
    def body(self) -> bytes:
        """The body as it came."""
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
    def redelivered(self) -> bool:
        """Whether the request may have been worked on before."""
        return self._request.redelivered

    @property
    def attempt(self) -> int:
        """Which attempt at this request it is, from 1: its route may have it tried again after some outcomes."""
        return read_attempts(self._request.headers) + 1

    @property
    def deadline(self) -> float:
        """Seconds that are left for this request, 0 when none are."""
        return max(0.0, self._deadline_at - self._clock.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the answer any more: cancelled by the caller, or past the deadline."""
        return self._cancelled

    def cancel(self) -> None:
        """Mark the call as cancelled; called by the runtime."""
        self._cancelled = True

    def set_timeout(self, seconds: float) -> None:
        """The deadline is `seconds` from now; called by the runtime."""
        self._deadline_at = self._clock.monotonic() + seconds

    def attach(self, send_progress: Callable[[Answer], None]) -> None:
        """Where progress goes; called by the runtime. Without it progress is dropped: the client did not ask for it."""
        self._send_progress = send_progress

    def raise_if_cancelled(self) -> None:
        """Raise `CallCancelledError` when nobody wants the answer any more: for long loops in a plain function."""
        if self._cancelled:
            raise CallCancelledError("The request was cancelled or its deadline passed.")

    def progress(self, value: Any) -> None:
        """Send a non-terminating reply: an `Answer`, or a value that becomes one. More may follow. Nothing is sent to a
        client that does not ask for progress (`x-progress`).

        In a thread it waits until the reply is on its way, so that a fast producer cannot fill the memory. Raises
        `CallCancelledError` when nobody wants the answer any more.
        """
        self.raise_if_cancelled()
        if self._send_progress is not None:
            self._send_progress(value if isinstance(value, Answer) else Answer(value))

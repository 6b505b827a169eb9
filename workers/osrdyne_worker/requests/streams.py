"""Streamed answers: the credit of each stream, and the sending of its parts. Called by the processor.

A part is sent only if the client has granted credit for it. A stream that waits for credit occupies no thread, and
after a moment no slot either: a slow client delays only its own stream. Source: docs/reference/protocol/streams.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup, WatchCell
from osrdyne.protocol.messages import ARROW_TYPE, Request, Response, wants_arrow
from osrdyne.protocol.retries import read_attempts
from osrdyne.protocol.streams import (
    ATTEMPT_HEADER,
    MAX_CREDIT,
    PART_HEADER,
    PARTS_HEADER,
    SILENCE_TIMEOUT,
    STREAM_HEADER,
    Grant,
    read_wanted_credit,
)
from osrdyne_worker.app.codec import error_response
from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.requests.inflight import InFlight
from osrdyne_worker.requests.replies import ReplySender

PAUSE_AFTER = 1.0
"""Seconds without credit after which a stream gives its slot back. Not at once: RabbitMQ then delivers a further
request to this worker, which other workers of the group could run."""
MAX_PAUSED = 16
"""Streams of a worker that may be without a slot; further ones wait for credit in their slots."""
LISTEN_TIMEOUT = 10.0
"""Seconds that a request waits until the worker can receive credit messages, after a start or a lost connection."""
CALLER_CHECK_INTERVAL = 5.0
"""Seconds between two checks whether the client of a stream without credit is gone."""


class Credit:
    """The number of parts of one stream that may be sent. Pure."""

    def __init__(self, granted: int) -> None:
        self.granted = granted
        self.sent = 0

    @property
    def is_open(self) -> bool:
        """Whether a part may be sent."""
        return self.sent < self.granted

    def grant(self, up_to: int) -> None:
        """Allow the parts up to this number. A smaller number, of a late message, is ignored."""
        # Limited: otherwise a client could make the worker fill the reply queue with a million parts.
        self.granted = max(self.granted, min(up_to, self.sent + MAX_CREDIT))


@dataclass(slots=True, eq=False)
class OpenStream:
    """One stream of this worker. Its id is a secret between worker and client: with the id one may grant credit.

    `received` is set by each credit message, `received_at` is the time of the last one.
    """

    credit: Credit
    received: Wakeup
    received_at: float
    attempt: int
    stream_id: str = field(default_factory=lambda: secrets.token_hex(16))

    def part(self, body: bytes) -> Response:
        """Make the reply for the next part, which uses one credit."""
        self.credit.sent += 1
        return Response(body=body, content_type=ARROW_TYPE, progress=True, headers=self._headers(PART_HEADER))

    def last(self, response: Response) -> Response:
        """Mark the final reply as the end of this stream."""
        return replace(response, headers={**response.headers, **self._headers(PARTS_HEADER)})

    def _headers(self, number: str) -> dict[str, object]:
        return {STREAM_HEADER: self.stream_id, number: self.credit.sent, ATTEMPT_HEADER: self.attempt}


class Wait(Enum):
    """How the wait of a stream for credit ended."""

    CREDIT = auto()
    SILENCE = auto()
    """The client has sent no credit message for `SILENCE_TIMEOUT`."""
    GONE = auto()


class Streams:
    """The streams of one worker. Used on the event loop only.

    `pause` gives the slot of a request back and returns whether it did; `resume` waits for a slot again. `is_gone`
    returns whether the client of a request has disconnected.
    """

    def __init__(
        self,
        replies: ReplySender,
        clock: Clock,
        *,
        pause: Callable[[InFlight], bool],
        resume: Callable[[InFlight], Awaitable[None]],
        is_gone: Callable[[InFlight], Awaitable[bool]],
    ) -> None:
        self._replies = replies
        self._clock = clock
        self._pause = pause
        self._resume = resume
        self._is_gone = is_gone
        self._open: dict[str, OpenStream] = {}
        self._listening: WatchCell[bool | None] = WatchCell(None)

    def listening(self, available: bool | None) -> None:
        """Note whether credit messages can be received; None: not known yet."""
        self._listening.set(available)

    async def is_wanted(self, request: Request) -> bool:
        """Whether the answer to this request is streamed if it is a table."""
        if read_wanted_credit(request.headers) is None or request.reply_to is None or not wants_arrow(request.accept):
            return False
        until = self._clock.monotonic() + LISTEN_TIMEOUT
        # Polled: this happens only in the first moments of a connection.
        while self._listening.value is None and self._clock.monotonic() < until:
            await self._clock.sleep(0.05)
        return self._listening.value is True

    def granted(self, headers: Mapping[str, object]) -> None:
        """Handle a credit message; one for a stream that has ended, or of another worker, is ignored."""
        grant = Grant.from_wire(headers)
        stream = None if grant is None else self._open.get(grant.stream_id)
        if grant is not None and stream is not None:
            stream.credit.grant(grant.up_to)
            stream.received_at = self._clock.monotonic()
            stream.received.set()

    async def send(self, job: InFlight, next_part: Callable[[], Awaitable[bytes | Response]]) -> Response | None:
        """Send the parts as credit allows; return the final reply, or None if the client has disconnected.

        Raises `BrokerError` (`PublishRefusedError` if the reply queue refuses a part), and what `next_part` raises.
        """
        stream = OpenStream(
            Credit(read_wanted_credit(job.request.headers) or 1),
            Wakeup(self._clock),
            self._clock.monotonic(),
            read_attempts(job.request.headers) + job.request.delivery_count + 1,
        )
        self._open[stream.stream_id] = stream
        try:
            while True:
                # First the credit, then the part: a stream that waits for credit holds no part in memory.
                waited = await self._until_credit(job, stream)
                if waited is Wait.GONE:
                    return None
                if waited is Wait.SILENCE:
                    return stream.last(error_response(_SILENT, path=job.request.path))
                part = await next_part()
                if isinstance(part, Response):
                    return stream.last(part)
                # Crash before or after the confirm: the unacknowledged request is delivered again. The next worker
                # begins a stream with another id, so that the client does not mix the two.
                await self._replies.send(job.broker.replies, job.request, stream.part(part), on_wait=lambda _: None)
        finally:
            del self._open[stream.stream_id]

    async def _until_credit(self, job: InFlight, stream: OpenStream) -> Wait:
        paused = False
        since = stream.received_at = self._clock.monotonic()
        check_at = since + CALLER_CHECK_INTERVAL
        while not stream.credit.is_open:
            received = await stream.received.wait(PAUSE_AFTER)
            now = self._clock.monotonic()
            # The time runs from `since`: messages without further credit must not keep the slot.
            if stream.credit.is_open or (received and now - since < PAUSE_AFTER):
                continue
            # Other requests can use the slot. The deadline and cancels can still end the stream.
            paused = paused or self._pause(job)
            if now - stream.received_at >= SILENCE_TIMEOUT:
                return Wait.SILENCE
            if now >= check_at:
                check_at = now + CALLER_CHECK_INTERVAL
                if await self._is_gone(job):
                    return Wait.GONE
        if paused:
            await self._resume(job)
        return Wait.CREDIT


_SILENT = RequestError(
    f"The client granted no credit for {SILENCE_TIMEOUT:.0f} s; the worker ended the stream.",
    code=408,
    error_code="stream_without_credit",
)

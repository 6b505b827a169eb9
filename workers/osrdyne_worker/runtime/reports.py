"""Activity reports of a worker to the controller. Reports may be lost and never delay a request.

`ReportWindow` counts requests and turns the counts into reports, at most once a second. `Reporter` keeps reports in a
bounded buffer and publishes them, transient and without confirms, while there is a connection. Every report names the
requests that run at that moment, so that the controller can find the cause of a worker's death.
Source: docs/reference/protocol/reports.md, "Activity reports".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message, connect
from osrdyne.errors import BrokerError
from osrdyne.logs import get_logger
from osrdyne.protocol.activity import (
    COMPLETED_CODE_HEADER,
    COMPLETED_PRIORITY_HEADER,
    COMPLETED_PROBE_HEADER,
    COMPLETED_ROUTE_HEADER,
    FIRST_REQUEST_FIELD,
    FIRST_REQUEST_PART,
    MAX_NAMED_REQUESTS,
    MAX_OUTCOMES,
    OUTCOMES_FIELD,
    REQUESTS_FIELD,
    RETURNED_FIELD,
    ActivityReport,
    Event,
)
from osrdyne.protocol.messages import JSON_TYPE
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.statuses import encode_status

REPORT_INTERVAL = 1.0
"""Seconds between two reports about requests."""
MAX_WAITING_REPORTS = 256
CONFIRM_TIMEOUT = 1.0
"""Seconds a request waits until RabbitMQ has received the report about it."""
APART_TIMEOUT = 3.0
"""Seconds for the last report of a worker whose event loop is blocked."""

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class Draft:
    """A report without the id of the worker."""

    event: Event
    details: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """The properties that completed requests share when one report covers them."""

    status: str
    path: str
    redelivered: bool
    route: str | None = None
    priority: int | None = None
    code: int | None = None
    probe: str | None = None


@dataclass(slots=True)
class _Tally:
    count: int = 0
    total_ms: int = 0
    max_ms: int = 0
    requests: list[str] = field(default_factory=list)


class ReportWindow:
    """Counts requests, and returns the counts at most every `REPORT_INTERVAL` seconds. No clock, no I/O.

    The first request of an idle worker is reported at once. `idle` is reported only after a report that implied "busy".
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._received = 0
        self._completed: dict[Completion, _Tally] = {}
        self.first_ms: int | None = None
        """Duration of the first request."""
        self._first_reported = False
        self._last = float("-inf")
        self._was_busy = False

    def received(self) -> None:
        self.in_flight += 1
        self._received += 1

    def completed(self, outcome: Completion, *, duration_ms: int, request: str | None = None) -> None:
        self.in_flight -= 1
        if self.first_ms is None:
            self.first_ms = duration_ms
        tally = self._completed.setdefault(outcome, _Tally())
        tally.count += 1
        tally.total_ms += duration_ms
        tally.max_ms = max(tally.max_ms, duration_ms)
        if request is not None:
            tally.requests.append(request)

    @property
    def is_full(self) -> bool:
        """Whether a report can name no more requests."""
        return any(len(tally.requests) >= MAX_OUTCOMES for tally in self._completed.values())

    def dropped(self) -> None:
        """A request left without an outcome: requeued, or lost with the connection."""
        self.in_flight -= 1

    def busy_reported(self) -> None:
        self._was_busy = True

    def due_in(self, now: float) -> float:
        """Seconds until `take` may be called; 0: now."""
        return max(0.0, self._last + REPORT_INTERVAL - now)

    def take(self, now: float) -> list[Draft]:
        """Return and reset the counts as reports. If there are any, the next are due after `REPORT_INTERVAL`."""
        drafts = []
        if self._received:
            drafts.append(Draft(Event.REQUEST_RECEIVED, {"count": self._received, "in_flight": self.in_flight}))
        drafts += [self._completion(outcome, tally) for outcome, tally in self._completed.items()]
        busy_before = self._was_busy or bool(drafts)
        if busy_before and self.in_flight == 0:
            drafts.append(Draft(Event.IDLE, {"in_flight": 0}))
        self._was_busy = busy_before and self.in_flight > 0
        self._received = 0
        self._completed = {}
        if drafts:
            self._last = now
        return drafts

    def _completion(self, outcome: Completion, tally: _Tally) -> Draft:
        headers: dict[str, object] = {
            "x-status": encode_status(outcome.status),
            "x-duration-ms": tally.total_ms // tally.count,
            "x-path": outcome.path,
            "x-redelivered": outcome.redelivered,
        }
        if outcome.route is not None:
            headers[COMPLETED_ROUTE_HEADER] = outcome.route
        if outcome.priority is not None:
            headers[COMPLETED_PRIORITY_HEADER] = outcome.priority
        if outcome.code is not None:
            headers[COMPLETED_CODE_HEADER] = outcome.code
        if outcome.probe is not None:
            headers[COMPLETED_PROBE_HEADER] = outcome.probe
        first, self._first_reported = None if self._first_reported else self.first_ms, True
        details: dict[str, object] = {
            "count": tally.count,
            "duration_ms_max": tally.max_ms,
            "in_flight": self.in_flight,
        }
        if tally.requests:
            details[OUTCOMES_FIELD] = list(tally.requests)
        if first is not None:
            details[FIRST_REQUEST_FIELD] = first
        return Draft(Event.REQUEST_COMPLETED, details, headers)


class Reporter:
    """Publishes the reports of one worker. `report` and the counting methods never block and never raise."""

    def __init__(self, *, key: Key, worker_id: WorkerId, exchange: str, clock: Clock) -> None:
        self._key = key
        self._worker_id = worker_id
        self._exchange = exchange
        self._clock = clock
        self._window = ReportWindow()
        self._running: Callable[[], list[str]] = list
        self._suspects: Callable[[], Mapping[str, object]] = dict
        self._last_requests: list[str] = []
        self._returned: list[str] = []
        # Bounded: without a connection the oldest reports are dropped, and requests go on.
        self._waiting: deque[Draft | asyncio.Future[None]] = deque(maxlen=MAX_WAITING_REPORTS)
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sending = False
        self._connected = False
        self.last_used = clock.time()
        """The time of the last arrival or end of a request, in seconds since the epoch; at first that of the start."""
        self.completed_requests = 0

    def watch(self, running: Callable[[], list[str]], suspects: Callable[[], Mapping[str, object]] = dict) -> None:
        """Set the functions that return the fingerprints of running requests, and the facts about suspects. Every
        report contains both."""
        self._running = running
        self._suspects = suspects

    @property
    def in_flight(self) -> int:
        return self._window.in_flight

    @property
    def first_request(self) -> Mapping[str, int]:
        """The milliseconds of the first request, as a part of the cold start; empty before its end."""
        return {} if self._window.first_ms is None else {FIRST_REQUEST_PART: self._window.first_ms}

    def report(self, event: Event, **details: object) -> None:
        """Queue a report about the worker itself."""
        if event is Event.BUSY:
            self._window.busy_reported()
        if event is Event.FAILED:
            # These requests end with the worker: all further reports name them, also after their handlers ended.
            self._last_requests = self._running()
        self._add(Draft(event, details))

    def report_apart(self, uri: str, event: Event, **details: object) -> None:
        """Publish a report now, from another thread and over its own connection, because the event loop is blocked.

        Blocks for at most `APART_TIMEOUT` seconds. A report that cannot be published is lost, as any other.
        """
        self._last_requests = self._running()
        draft = self._complete(Draft(event, details))

        async def publish() -> None:
            async with asyncio.timeout(APART_TIMEOUT):
                connection = await connect(ConnectionOptions(uri, name=f"osrdyne-worker {self._worker_id} last report"))
                channel = await connection.channel(confirms=True)
                await channel.publish(self._message(draft), exchange=self._exchange, routing_key=self._key)

        try:
            asyncio.run(publish())
        except (BrokerError, TimeoutError) as error:
            log.warning("last report cannot be published", exchange=self._exchange, reason=str(error))

    async def confirm_running(self) -> None:
        """Report the running requests, and wait at most `CONFIRM_TIMEOUT` until RabbitMQ has received the report.

        Called before a redelivered request runs: if it kills this worker as well, the controller knows the request.
        """
        if not self._connected:
            return
        self.report(Event.BUSY, in_flight=self.in_flight)
        received: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Behind the report in the same buffer: it is resolved only after RabbitMQ has read the report.
        self._waiting.append(received)
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_TIMEOUT):
                await received

    def received(self) -> None:
        self.last_used = self._clock.time()
        self._window.received()
        self._schedule()

    def completed(self, outcome: Completion, *, duration_ms: int, request: str | None = None) -> None:
        """Count a completed request; `request`: its fingerprint, if the report is to name it."""
        self.last_used = self._clock.time()
        self.completed_requests += 1
        self._window.completed(outcome, duration_ms=duration_ms, request=request)
        if self._window.is_full:
            self.flush()  # before it is due: circuits count every request that is named
        self._schedule()

    def dropped(self) -> None:
        self._window.dropped()
        self._schedule()

    def returned(self, request: str) -> None:
        """Name a request in the next report whose return RabbitMQ counts, although it is no evidence against it."""
        if len(self._returned) < MAX_NAMED_REQUESTS:
            self._returned.append(request)
        self._schedule()

    def flush(self) -> None:
        """Queue the counts now, without waiting until they are due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        drafts = self._window.take(self._clock.monotonic())
        if self._returned and not drafts:
            drafts = [Draft(Event.BUSY if self.in_flight else Event.IDLE, {"in_flight": self.in_flight})]
        for draft in drafts:
            self._add(draft)

    async def flushed(self) -> None:
        """Wait until all queued reports are published. Without a connection this waits for one."""
        while self._waiting or self._sending:
            await self._clock.sleep(0.01)

    async def send(self, connection: Connection) -> None:
        """Publish reports while the connection is open; retry while the exchange is missing."""
        failures = 0
        while not connection.is_closed:
            try:
                channel = await connection.channel()
                self._wake.set()  # publish what an earlier connection has left
                self._connected = True
                try:
                    while True:
                        await self._send_waiting(channel)
                        failures = 0
                finally:
                    # Also when this task is cancelled, as it is when the connection is lost.
                    self._connected = False
            except BrokerError as error:
                failures += 1
                if failures == 1 and not connection.is_closed:
                    log.warning("activity reports cannot be published", exchange=self._exchange, reason=str(error))
                await self._clock.sleep(Backoff(initial=1.0).delay(failures))

    async def _send_waiting(self, channel: Channel) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._sending = True
        try:
            while self._waiting:
                # Taken out before the publish: a report that fails is lost, and never delays those behind it.
                match self._waiting.popleft():
                    case Draft() as draft:
                        await channel.publish(self._message(draft), exchange=self._exchange, routing_key=self._key)
                    case received:
                        # RabbitMQ answers the ping after it has processed what was published before.
                        await channel.ping()
                        if not received.done():
                            received.set_result(None)
        finally:
            self._sending = False

    def _message(self, draft: Draft) -> Message:
        report = ActivityReport(self._key, draft.event, self._worker_id, draft.details, draft.headers)
        body = report.wire_body()
        return Message(
            body=body,
            headers=report.wire_headers(),
            content_type=JSON_TYPE if body else None,
            persistent=False,
        )

    def _add(self, draft: Draft) -> None:
        self._waiting.append(self._complete(draft))
        self._wake.set()

    def _complete(self, draft: Draft) -> Draft:
        """Add the running requests and the suspects."""
        # Now and not when the report is published: other requests may run by then.
        requests = self._last_requests or self._running()
        if requests:
            draft = replace(draft, details={**draft.details, REQUESTS_FIELD: requests})
        if suspects := self._suspects():
            draft = replace(draft, details={**draft.details, **suspects})
        if self._returned:
            draft = replace(draft, details={**draft.details, RETURNED_FIELD: self._returned})
            self._returned = []
        return draft

    def _schedule(self) -> None:
        if self._timer is not None:
            return
        # Never at once: a request that has just arrived does not run yet, and the report should name it.
        delay = self._window.due_in(self._clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self.flush)

"""Publish the messages of a simulation through the client, at their times, and count the outcomes.

Used by `osrdyne telemetry simulate` and by demos. Memory is bounded: at most `in_flight` messages wait for an answer,
and response times are counted in a histogram.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from osrdyne.aio.clock import Clock
from osrdyne.client.errors import (
    ClientClosedError,
    ConnectionLostError,
    PoolNotFoundError,
    RequestError,
    RequestTimeoutError,
)
from osrdyne.protocol.messages import JSON_TYPE
from osrdyne.telemetry.simulator import MessageKind, SimulatedMessage

Publish = Callable[[SimulatedMessage], Awaitable[object]]
"""Publishes a message; returns when it is answered or, if it is one-way, when RabbitMQ has confirmed it. Raises
`RequestError`."""

_GROWTH = 1.02
"""Ratio of neighbouring bins of the histogram: a percentile is at most 2 % too high."""
_SHORTEST = 1e-4


class Times:
    """A histogram of durations in seconds. Its memory does not grow with their number."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self.largest = 0.0

    def add(self, seconds: float) -> None:
        self._bins[max(0, math.ceil(math.log(max(seconds, _SHORTEST) / _SHORTEST, _GROWTH)))] += 1
        self.largest = max(self.largest, seconds)

    def percentile(self, share: float) -> float | None:
        """The duration that this share of all does not exceed; None if there is none."""
        rank = math.ceil(share * self._bins.total())
        for place in sorted(self._bins):
            rank -= self._bins[place]
            if rank <= 0:
                return min(_SHORTEST * _GROWTH**place, self.largest)
        return None


@dataclass(slots=True)
class KindCounts:
    """The outcomes of the messages of one kind. `refused`: by status of the answer. `unanswered`: by cause; these may
    have been accepted."""

    sent: int = 0
    events: int = 0
    confirmed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    times: Times = field(default_factory=Times)


@dataclass(slots=True)
class RunSummary:
    """The outcome of a run. `seconds`: its duration. `behind`: the longest delay of a message after its time."""

    kinds: dict[MessageKind, KindCounts] = field(default_factory=dict)
    seconds: float = 0.0
    behind: float = 0.0
    interrupted: bool = False

    @property
    def sent(self) -> int:
        return sum(one.sent for one in self.kinds.values())

    @property
    def events(self) -> int:
        return sum(one.events for one in self.kinds.values())

    @property
    def confirmed(self) -> int:
        return sum(one.confirmed for one in self.kinds.values())

    @property
    def refused(self) -> Counter[str]:
        return sum((one.refused for one in self.kinds.values()), Counter[str]())

    @property
    def unanswered(self) -> Counter[str]:
        return sum((one.unanswered for one in self.kinds.values()), Counter[str]())

    @property
    def waiting(self) -> int:
        """The number of messages in flight."""
        return self.sent - self.confirmed - self.refused.total() - self.unanswered.total()

    def to_json(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "events": self.events,
            "confirmed": self.confirmed,
            "refused": dict(self.refused),
            "unanswered": dict(self.unanswered),
            "seconds": round(self.seconds, 3),
            "behind": round(self.behind, 3),
            "interrupted": self.interrupted,
            "kinds": {
                str(kind): {
                    "sent": one.sent,
                    "events": one.events,
                    "confirmed": one.confirmed,
                    "refused": dict(one.refused),
                    "unanswered": dict(one.unanswered),
                    "answered_p50": one.times.percentile(0.5),
                    "answered_p95": one.times.percentile(0.95),
                }
                for kind, one in sorted(self.kinds.items())
            },
        }


class SimulatorRun:
    """One run. `speed`: a multiple of real time; 0: as fast as possible."""

    def __init__(self, publish: Publish, *, clock: Clock, speed: float = 1.0, in_flight: int = 500) -> None:
        self._publish = publish
        self._clock = clock
        self._speed = speed
        self._slots = asyncio.Semaphore(in_flight)
        self._wake = asyncio.Event()
        self._stopped = False
        self._failure: RequestError | None = None
        self.summary = RunSummary()

    def stop(self) -> None:
        """Send no further messages; `run` returns when those in flight are answered."""
        self._stopped = True
        self._wake.set()

    async def run(self, messages: Iterable[SimulatedMessage]) -> RunSummary:
        """Send the messages and wait for all answers. Raises `PoolNotFoundError` and `ClientClosedError`."""
        began = self._clock.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for message in messages:
                    if self._speed:
                        due = began + message.at_us / 1_000_000 / self._speed
                        await self._sleep(due - self._clock.monotonic())
                    await self._slots.acquire()
                    if self._stopped:
                        self.summary.interrupted = True
                        break
                    if self._speed:
                        self.summary.behind = max(self.summary.behind, self._clock.monotonic() - due)
                    group.create_task(self._send(message), name="osrdyne simulated message")
        finally:
            self.summary.seconds = self._clock.monotonic() - began
        if self._failure is not None:
            raise self._failure
        return self.summary

    async def _sleep(self, seconds: float) -> None:
        """Sleep until the time has passed, or `stop` is called."""
        if seconds <= 0:
            return
        timer = self._clock.call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        if not self._stopped:
            self._wake.clear()

    async def _send(self, message: SimulatedMessage) -> None:
        counts = self.summary.kinds.setdefault(message.kind, KindCounts())
        counts.sent += 1
        counts.events += message.events
        began = self._clock.monotonic()
        try:
            await self._publish(message)
        except (PoolNotFoundError, ClientClosedError) as error:
            self._failure = error
            self.stop()
        except RequestTimeoutError:
            counts.unanswered["timeout"] += 1
        except ConnectionLostError:
            counts.unanswered["connection lost"] += 1
        except RequestError as error:
            # An error without a status is a refusal by RabbitMQ.
            counts.refused[error.status or "not accepted by RabbitMQ"] += 1
        else:
            counts.confirmed += 1
            counts.times.add(self._clock.monotonic() - began)
        finally:
            self._slots.release()


@dataclass(frozen=True, slots=True)
class Devices:
    """Publishes the messages of all devices through one client. `one_way`: without an answer."""

    client: Any
    path: str = "/telemetry"
    alarm_path: str = "/alarm"
    timeout: float = 60.0
    one_way: bool = False

    async def publish(self, message: SimulatedMessage) -> None:
        """Publish a message. The client sends it again if the connection is lost, as devices do."""
        path = self.alarm_path if message.is_alarm else self.path
        options: dict[str, Any] = {
            "headers": message.headers,
            "content_type": JSON_TYPE,
            "message_id": message.message_id,
            "idempotent": True,
        }
        if self.one_way:
            await self.client.cast(message.key, path, message.body, **options)
        else:
            await self.client.call(message.key, path, message.body, timeout=self.timeout, **options)

"""The observed state of each key's queue and workers in this term.

The request queues loop is the only writer of the queue status, the worker groups loop of the worker status. Other
components read them and subscribe to the keys that changed. A term starts with nothing observed: state of an earlier
term is discarded (lifecycle: term-ends-whole), and a listed binding is UNKNOWN until bind-ok or unbind-ok of this term
(lifecycle: listed-bindings-are-unknown).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from osrdyne.aio.signals import ChangeFeed
from osrdyne.drivers.base import Instance
from osrdyne.errors import OsrdyneError
from osrdyne.protocol.names import Key
from osrdyne.protocol.refusals import KeyRefusal

CIRCUIT = "circuit"
"""What a group waits for while a circuit pauses it."""


class Binding(StrEnum):
    UNKNOWN = "unknown"
    BOUND = "bound"
    UNBOUND = "unbound"


@dataclass(frozen=True, slots=True)
class ObservedQueue:
    """A request queue. `unbound_at`, `bound_at`: monotonic time of the latest unbind-ok or bind-ok of this term;
    queues of unused priority levels were unbound before that. `disposable`: unused priority levels whose queue can
    be deleted. `fault`: why the queue is unavailable. `unverified`: the queue or its binding may be gone, and
    RabbitMQ is asked; `checked_at` (monotonic): when it was last asked."""

    exists: bool = False
    binding: Binding = Binding.UNKNOWN
    unbound_at: float | None = None
    bound_at: float | None = None
    disposable: tuple[int, ...] = ()
    fault: OsrdyneError | None = None
    unverified: bool = False
    checked_at: float | None = None

    @property
    def is_bound(self) -> bool:
        return self.exists and self.binding is Binding.BOUND and not self.unverified


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why a group has no worker. Until `retry_at` (monotonic) its requests are answered at once, with `refusal` if the
    key is refused."""

    reason: str
    log_lines: tuple[str, ...]
    attempts: int
    retry_at: float
    refusal: KeyRefusal | None = None


@dataclass(frozen=True, slots=True)
class ObservedWorkers:
    """The workers of a group. `stopping`: a stop is decided or in progress, so that a bind must wait (lifecycle:
    bind-waits-for-stop). `empty_since`: monotonic time since when a group with a queue is known to have no worker."""

    instances: tuple[Instance, ...] = ()
    stopping: bool = False
    starting: bool = False
    empty_since: float | None = None
    failure: StartFailure | None = None
    waiting_for: str | None = None  # The setting that keeps a worker from being started, or `CIRCUIT`.

    @property
    def is_empty(self) -> bool:
        """Whether no worker runs, stops or is being started: the condition for deleting the queue (lifecycle:
        delete-preconditions)."""
        return not (self.instances or self.stopping or self.starting)


class QueueStatuses:
    """The status of all request queues of a term."""

    def __init__(self) -> None:
        self._statuses: dict[Key, ObservedQueue] = {}
        self._waiters: dict[Key, dict[asyncio.Future[None], None]] = {}
        self.feed: ChangeFeed[Key] = ChangeFeed()
        self.awaited: ChangeFeed[Key] = ChangeFeed()  # Keys whose binding a request has begun to wait for.

    def __getitem__(self, key: Key) -> ObservedQueue:
        return self._statuses.get(key, _NO_QUEUE)

    def keys(self) -> list[Key]:
        return list(self._statuses)

    def existing(self) -> set[Key]:
        """Keys whose queue exists, as far as this term knows."""
        return {key for key, status in self._statuses.items() if status.exists}

    def is_awaited(self, key: Key) -> bool:
        """Whether a request waits for the binding."""
        return key in self._waiters

    def update(self, key: Key, **changes: Any) -> None:
        """Replace fields of the key's status and wake the requests that wait for it. Of a queue that does not exist,
        only the fault is kept."""
        status = replace(self[key], **changes)
        if not status.exists:
            status = ObservedQueue(fault=status.fault)
        if status == self[key]:
            return
        if status == _NO_QUEUE:
            self._statuses.pop(key, None)
        else:
            self._statuses[key] = status
        if status.is_bound or status.fault is not None:
            for waiter in self._waiters.pop(key, ()):
                _end_wait(waiter, None if status.is_bound else status.fault)
        self.feed.notify(key)

    async def wait_bound(self, key: Key, *, limit: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait until the queue is bound in this term. Raises the key's fault if the queue is unavailable, and
        `TimeoutError` if `limit`, which runs concurrently, returns first.

        Waiting requests continue in their order, and before any request that arrives once the queue is bound.
        """
        status = self[key]
        if status.is_bound:
            return
        if status.fault is not None:
            # Raised many times: with its traceback it would keep every frame that it has passed through.
            raise status.fault.with_traceback(None)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, {})[waiter] = None
        self.awaited.notify(key)
        timer = asyncio.ensure_future(limit()) if limit else None
        if timer is not None:
            timer.add_done_callback(lambda _: _end_wait(waiter, TimeoutError()))
        try:
            await waiter
        finally:
            self._stop_waiting(key, waiter)
            if timer is not None:
                timer.cancel()

    def _stop_waiting(self, key: Key, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(key, {})
        waiters.pop(waiter, None)
        if not waiters:
            self._waiters.pop(key, None)


class WorkerStatuses:
    """The status of the workers of all groups of a term."""

    def __init__(self) -> None:
        self._statuses: dict[Key, ObservedWorkers] = {}
        self.feed: ChangeFeed[Key] = ChangeFeed()

    def __getitem__(self, key: Key) -> ObservedWorkers:
        return self._statuses.get(key, _NO_WORKERS)

    def keys(self) -> list[Key]:
        return list(self._statuses)

    def set(self, key: Key, status: ObservedWorkers) -> None:
        if status == self[key]:
            return
        if status == _NO_WORKERS:
            self._statuses.pop(key, None)
        else:
            self._statuses[key] = status
        self.feed.notify(key)


def _end_wait(waiter: asyncio.Future[None], fault: OsrdyneError | TimeoutError | None) -> None:
    if waiter.done():  # the waiting request was cancelled
        return
    if fault is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(fault)
        waiter.exception()  # marks the exception as retrieved, also if the waiting request is cancelled now


_NO_QUEUE = ObservedQueue()
_NO_WORKERS = ObservedWorkers()

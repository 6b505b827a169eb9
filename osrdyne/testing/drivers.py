"""A driver in memory, for tests of components that call a driver. It passes the conformance suite of drivers.

The workers are in a `FakeBackend`: a second `FakeDriver` on the same backend stands for a restarted controller.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import WatchCell
from osrdyne.drivers.base import (
    Driver,
    DriverContext,
    DriverOptions,
    Exit,
    Finding,
    Instance,
    InstanceId,
    InstanceState,
    WorkerSpec,
    hash_options,
)
from osrdyne.errors import DriverUnavailableError, SlotTakenError
from osrdyne.protocol.names import Key

_AWAY = "The fake backend is away."


class Call(NamedTuple):
    """One call of the driver: `start`, `stop`, `remove` or `logs`, with the key."""

    method: str
    key: Key | None


@dataclass(slots=True)
class FakeWorker:
    """One worker that does nothing. `stubborn`: it ignores SIGTERM, and is killed after the grace."""

    instance: Instance
    spec: WorkerSpec
    lines: list[str] = field(default_factory=list)
    stubborn: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class FakeBackend:
    """The workers of all pools, which survive a controller. `away`: it answers no driver."""

    def __init__(self) -> None:
        self.away = False
        self.workers: dict[InstanceId, FakeWorker] = {}
        self.changes = WatchCell(0)
        self._serial = itertools.count(1)

    def add(self, spec: WorkerSpec, *, spec_hash: str, started_at: float) -> FakeWorker:
        serial = next(self._serial)
        instance = Instance(
            instance_id=InstanceId(f"fake-{serial}"),
            key=spec.key,
            slot=spec.slot,
            worker_id=spec.worker_id,
            state=InstanceState.RUNNING,
            spec_hash=spec_hash,
            started_at=started_at,
            external_id=str(serial),
        )
        worker = self.workers[instance.instance_id] = FakeWorker(instance, spec)
        self.changed()
        return worker

    def end(self, worker: FakeWorker, end: Exit) -> None:
        if not worker.gone.is_set():
            worker.instance = replace(worker.instance, state=InstanceState.EXITED, exit=end)
            worker.gone.set()
            self.changed()

    def changed(self) -> None:
        self.changes.set(self.changes.value + 1)


class FakeDriver(Driver):
    """Hooks: `calls` has the calls in their order; `on_start` is called with each new worker before `start` returns."""

    name: ClassVar[str] = "fake"

    def __init__(
        self, clock: Clock, *, pool: str = "pool", backend: FakeBackend | None = None, spec_hash: str = "spec"
    ) -> None:
        super().__init__(DriverOptions(), DriverContext(pool, "fake", clock, worker_command=()))
        self.backend = backend or FakeBackend()
        self.pool = pool
        self.calls: list[Call] = []
        self.on_start: Callable[[FakeWorker], None] | None = None
        self.current_spec_hash = spec_hash
        self.starts_under_way = 0
        self.most_starts_under_way = 0
        self._clock = clock
        self._start_errors: deque[Exception] = deque()
        self._stop_errors: deque[Exception] = deque()
        self._list_errors: deque[Exception] = deque()
        self._lists_allowed = asyncio.Event()
        self._lists_allowed.set()
        self._starts_allowed = asyncio.Event()
        self._starts_allowed.set()

    # --- hooks of tests

    def fail_next_start(self, error: Exception) -> None:
        """Let the next start raise `error`; further calls are for the starts after it."""
        self._start_errors.append(error)

    def fail_next_stop(self, error: Exception) -> None:
        self._stop_errors.append(error)

    def fail_next_list(self, error: Exception) -> None:
        self._list_errors.append(error)

    def hang_lists(self) -> None:
        """From now on `list_instances` reads the instances, but does not return them until `release_lists`."""
        self._lists_allowed.clear()

    def release_lists(self) -> None:
        self._lists_allowed.set()

    def hang_starts(self) -> None:
        """From now on `start` creates nothing, and does not return, until `release_starts`."""
        self._starts_allowed.clear()

    def release_starts(self) -> None:
        self._starts_allowed.set()

    def exit_instance(
        self,
        instance_id: InstanceId,
        code: int | None = None,
        *,
        signal: str | None = None,
        lines: tuple[str, ...] = (),
    ) -> None:
        """Let a worker end by itself, after it has written `lines`."""
        worker = self.backend.workers[instance_id]
        worker.lines.extend(lines)
        self.backend.end(worker, Exit(code=code, signal=signal))

    def workers_of(self, key: Key) -> list[FakeWorker]:
        """The workers of a key that have not been removed, oldest first."""
        return [worker for worker in self._own() if worker.instance.key == key]

    def count(self, method: str, key: Key | None = None) -> int:
        """How often `method` was called (for `key`)."""
        return sum(call.method == method and key in (None, call.key) for call in self.calls)

    # --- the driver

    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        return self.current_spec_hash if config is None else f"{self.current_spec_hash}+{hash_options(config)}"

    async def list_instances(self) -> list[Instance]:
        if self._list_errors:
            raise self._list_errors.popleft()
        self._require_backend()
        listing = [worker.instance for worker in self._own()]
        await self._lists_allowed.wait()
        return listing

    async def start(self, spec: WorkerSpec) -> Instance:
        self.calls.append(Call("start", spec.key))
        self._require_backend()
        self.starts_under_way += 1
        self.most_starts_under_way = max(self.most_starts_under_way, self.starts_under_way)
        try:
            await self._starts_allowed.wait()
        finally:
            self.starts_under_way -= 1
        if self._start_errors:
            raise self._start_errors.popleft()
        if any(worker.instance.slot == spec.slot for worker in self.workers_of(spec.key)):
            raise SlotTakenError("A worker of this slot exists already.", key=spec.key, slot=spec.slot)
        worker = self.backend.add(
            spec, spec_hash=spec.spec_hash or self.current_spec_hash, started_at=self._clock.time()
        )
        if self.on_start is not None:
            self.on_start(worker)
        return worker.instance

    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        worker = self._record_call("stop", instance_id)
        if self._stop_errors:
            raise self._stop_errors.popleft()
        if worker is None or worker.gone.is_set():
            return
        worker.instance = replace(worker.instance, state=InstanceState.STOPPING)
        self.backend.changed()
        if worker.stubborn:
            await self._until_gone(worker, grace)
        self.backend.end(worker, Exit(signal="SIGKILL") if worker.stubborn else Exit(code=0))

    async def _until_gone(self, worker: FakeWorker, grace: float) -> None:
        waits = {asyncio.ensure_future(worker.gone.wait()), asyncio.ensure_future(self._clock.sleep(grace))}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def remove(self, instance_id: InstanceId) -> None:
        worker = self._record_call("remove", instance_id)
        if worker is not None and worker.gone.is_set():
            del self.backend.workers[instance_id]
            self.backend.changed()

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        worker = self._record_call("logs", instance_id)
        return tuple(worker.lines[-lines:]) if worker is not None and lines > 0 else ()

    async def events(self) -> AsyncIterator[None]:
        seen = self.backend.changes.value
        while True:
            if self.backend.changes.value == seen:
                await self.backend.changes.changed()
            seen = self.backend.changes.value
            yield

    async def check(self) -> list[Finding]:
        if self.backend.away:
            return [Finding("driver", ok=False, message=_AWAY)]
        return [Finding("driver", ok=True, message="The fake driver keeps its workers in memory.")]

    def _require_backend(self) -> None:
        if self.backend.away:
            raise DriverUnavailableError(_AWAY)

    def _own(self) -> list[FakeWorker]:
        return [worker for worker in self.backend.workers.values() if worker.spec.pool == self.pool]

    def _record_call(self, method: str, instance_id: InstanceId) -> FakeWorker | None:
        worker = next((worker for worker in self._own() if worker.instance.instance_id == instance_id), None)
        self.calls.append(Call(method, worker.instance.key if worker is not None else None))
        self._require_backend()
        return worker

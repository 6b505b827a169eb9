"""The driver that starts workers as containers of a Docker engine, local or remote.

The labels of a container contain all data of its worker, and its name is the lock of the slot. This module is
asynchronous; blocking calls are in `containers` and run in a few threads, which limit the concurrent calls of the
engine. Events of the engine cause listings; the pool also lists slowly, because events may be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import ClassVar, TypeVar

from docker.errors import APIError

from osrdyne.aio.signals import WatchCell
from osrdyne.aio.tasks import Threads
from osrdyne.drivers.base import (
    Driver,
    DriverContext,
    DriverOptions,
    Finding,
    Instance,
    InstanceId,
    InstanceState,
    WorkerSpec,
    hash_options,
)
from osrdyne.drivers.docker.checks import examine
from osrdyne.drivers.docker.containers import Containers, ImageMissingError, Inspected
from osrdyne.drivers.docker.engine import THREADS, Engine, is_local
from osrdyne.drivers.docker.events import SILENCE, EventReader
from osrdyne.drivers.docker.images import Images
from osrdyne.drivers.docker.labels import Identity
from osrdyne.drivers.docker.launch import explain, shape
from osrdyne.drivers.docker.options import BrokerUri, DockerOptions, Pull
from osrdyne.errors import DriverUnavailableError

T = TypeVar("T")

_POLL_INTERVAL = 1.0  # Seconds between two polls of a container that is being stopped, if no event comes.
_KILL_PATIENCE = 30.0  # Seconds within which a killed container must be gone.
_CLOSE_PATIENCE = 3.0  # Seconds for which `close` waits for calls of the engine; the next daemon lists their effects.


class DockerDriver(Driver):
    """Starts, lists and stops worker containers. Its options: `DockerOptions`."""

    name: ClassVar[str] = "docker"
    options_model: ClassVar[type[DriverOptions]] = DockerOptions

    def __init__(self, options: DockerOptions, context: DriverContext) -> None:
        super().__init__(options, context)
        self._options = options
        self.same_host = is_local(options)
        self._command = options.command or ("osrdyne-worker", context.worker_app)
        self._identity = Identity(context.pool, options.stack or context.stack)
        self._engine = Engine(options, timeout=options.timeout)
        self._containers = Containers(
            self._engine,
            options,
            self._identity,
            command=self._command,
            spec_hash=self.spec_hash(),
            uri_in_file=options.broker_uri is BrokerUri.FILE and not context.uri_in_environment,
            clock=context.clock,
        )
        self._images = Images(Engine(options, timeout=options.pull_timeout), options.image)
        self._threads = Threads("docker-driver", limit=THREADS)
        self._changes = WatchCell(0)
        self._reader: EventReader | None = None
        self._stopping: set[str] = set()

    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        return hash_options(shape(self._options, self._command, self.context.shape_of(config)))

    async def list_instances(self) -> list[Instance]:
        # Copied before the call: containers that are stopped while the engine lists stay in `_stopping`.
        stopping = frozenset(self._stopping)
        listed = await self._call(lambda: self._containers.instances(stopping))
        self._stopping -= stopping - {item.instance_id for item in listed if item.state is not InstanceState.EXITED}
        return listed

    async def start(self, spec: WorkerSpec) -> Instance:
        if self._options.pull is Pull.ALWAYS:
            await self._images.pull()
        try:
            may_pull = self._options.pull is Pull.MISSING
            instance = await self._call(lambda: self._containers.start(spec, may_pull=may_pull))
        except ImageMissingError:
            # In its own threads: a pull may take minutes, and must not delay other starts.
            await self._images.pull()
            instance = await self._call(lambda: self._containers.start(spec, may_pull=False))
        self._changed()
        return instance

    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        seen = await self._call(lambda: self._containers.find_started(instance_id))
        if seen is not None and seen.is_up:
            await self._end(seen, grace)
        self._changed()

    async def remove(self, instance_id: InstanceId) -> None:
        await self._call(lambda: self._containers.remove(instance_id))
        self._changed()

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        if lines <= 0:
            return ()

        def read() -> tuple[str, ...]:
            seen = self._containers.find(instance_id)
            return () if seen is None else self._containers.logs(seen.container_id, lines=lines)

        return await self._call(read)

    async def events(self) -> AsyncIterator[None]:
        self._read_events()
        seen = self._changes.value
        while True:
            if self._changes.value == seen:
                await self._changes.changed()
            seen = self._changes.value
            yield

    async def check(self) -> list[Finding]:
        return await self._threads.run(lambda: examine(self._engine, self._options, broker=self.context.stack))

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    # --- ending a container

    async def _end(self, seen: Inspected, grace: float) -> None:
        self._read_events()
        # Before the signal: it must be listed as stopping as long as it may run (lifecycle: bind-waits-for-stop).
        self._stopping.add(seen.container_id)
        self._changed()
        if grace > 0:
            await self._call(lambda: self._containers.signal(seen.container_id, "SIGTERM"))
            if await self._has_gone(seen, within=grace):
                return
        # Crash before: the worker ends by itself, or the next leader lists it as running and decides again.
        await self._call(lambda: self._containers.signal(seen.container_id, "SIGKILL"))
        if not await self._has_gone(seen, within=_KILL_PATIENCE):
            raise DriverUnavailableError(
                f"The container {seen.name.removeprefix('/')} was killed, but is still running."
            )

    async def _has_gone(self, seen: Inspected, *, within: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._until_gone(seen)
                return True
        return False

    async def _until_gone(self, seen: Inspected) -> None:
        while True:
            # Read before the call, so that an event in between is not missed.
            before = self._changes.value
            now = await self._call(lambda: self._containers.find(InstanceId(seen.container_id)))
            if now is None or not now.is_up:
                return
            if self._changes.value == before:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changes.changed(), _POLL_INTERVAL)

    # --- threads

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await self._threads.run(function)
        except APIError as error:
            raise DriverUnavailableError(f"The Docker engine refused: {explain(error)}.") from error

    def _read_events(self) -> None:
        if self._reader is None:
            loop = asyncio.get_running_loop()

            def notify() -> None:
                with suppress(RuntimeError):  # the loop is closed: the result is not needed
                    loop.call_soon_threadsafe(self._changed)

            engine = Engine(self._options, timeout=SILENCE)
            self._reader = EventReader(engine, self._identity.filters(), notify, clock=self.context.clock)
            self._reader.start()

    def _changed(self) -> None:
        self._changes.set(self._changes.value + 1)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._threads.join(_CLOSE_PATIENCE)
        self._images.close()
        self._engine.close()

"""The driver that starts workers as processes of the daemon's own host (Linux).

The workers outlive the daemon: each has a session of its own, writes to a file and holds the lock of its slot. The next
leader finds them by the state directory and by their environment. This module is asynchronous; all blocking calls are
in `workers` and run in one thread, so that they need no locks.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

from osrdyne.aio.signals import WatchCell
from osrdyne.drivers.base import (
    Driver,
    DriverContext,
    DriverOptions,
    Finding,
    Instance,
    InstanceId,
    WorkerSpec,
    hash_options,
)
from osrdyne.drivers.subprocess.launch import Launch
from osrdyne.drivers.subprocess.logs import LogFiles
from osrdyne.drivers.subprocess.options import SubprocessOptions, log_directory, state_directory
from osrdyne.drivers.subprocess.processes import unavailable
from osrdyne.drivers.subprocess.state import StateDirectory
from osrdyne.drivers.subprocess.workers import LocalWorker, LocalWorkers
from osrdyne.errors import ConfigurationError, DriverUnavailableError

T = TypeVar("T")

# Seconds between two scans of all processes of the host. Listings in between use the records and the known processes.
_SCAN_INTERVAL = 60.0


class SubprocessDriver(Driver):
    """Starts, lists and stops worker processes. Its options: `SubprocessOptions`."""

    name: ClassVar[str] = "subprocess"
    options_model: ClassVar[type[DriverOptions]] = SubprocessOptions
    same_host = True

    def __init__(self, options: SubprocessOptions, context: DriverContext) -> None:
        super().__init__(options, context)
        if not hasattr(os, "pidfd_open"):
            raise ConfigurationError("driver.name: the subprocess driver needs Linux; use noop or another driver here.")
        self._options = options
        self._command = options.command or context.worker_command
        state = state_directory(options, context)
        self._state = StateDirectory(state)
        self._logs = LogFiles(
            directory=log_directory(options, state),
            max_bytes=options.log_max_bytes,
            old_files=options.log_files,
            retention=options.log_retention,
        )
        # No other process inherits its writing end, which therefore ends with this process, however that ends.
        self._lifeline = os.pipe() if options.end_with_daemon else None
        launch = Launch(
            self._command,
            options.cwd,
            options.inherit,
            options.environment,
            self.spec_hash(),
            context.uri_in_environment,
            None if self._lifeline is None else self._lifeline[0],
        )
        self._workers = LocalWorkers(self._state, self._logs, launch)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="subprocess-driver")
        self._watches: dict[int, asyncio.Event] = {}
        self._changes = WatchCell(0)
        self._next_scan = float("-inf")

    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        return hash_options(
            {
                "command": self._command,
                "cwd": self._options.cwd,
                "environment": self._options.environment,
                "inherit": self._options.inherit,
                "config": self.context.shape_of(config),
            }
        )

    async def list_instances(self) -> list[Instance]:
        now = self.context.clock.monotonic()
        scan = now >= self._next_scan
        instances = await self._call(lambda: self._list(scan=scan))
        if scan:
            self._next_scan = now + _SCAN_INTERVAL
        return instances

    async def start(self, spec: WorkerSpec) -> Instance:
        now = self.context.clock.time()
        instance = await self._call(lambda: self._workers.start(spec, now=now))
        self._changed()
        return instance

    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        worker = await self._call_for(instance_id, lambda: self._workers.ask_to_stop(instance_id))
        if worker is None:
            return
        self._changed()
        if not await self._has_gone(worker, within=grace):
            await self._call(lambda: self._workers.kill(worker))
        await self._call(self._workers.settle)
        self._changed()
        if worker.lingering:
            raise DriverUnavailableError(
                f"The worker {worker.record.worker_id} has ended, but processes that it started cannot be killed."
            )

    async def remove(self, instance_id: InstanceId) -> None:
        await self._call_for(instance_id, lambda: self._workers.remove(instance_id))
        self._changed()

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        return await self._call_for(instance_id, lambda: self._workers.tail(instance_id, lines=lines))

    async def events(self) -> AsyncIterator[None]:
        seen = self._changes.value
        while True:
            if self._changes.value == seen:
                await self._changes.changed()
            seen = self._changes.value
            yield

    async def check(self) -> list[Finding]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._check)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)
        lifeline, self._lifeline = self._lifeline, None
        for descriptor in lifeline or ():
            os.close(descriptor)
        self._forget_ended()
        for worker in self._workers.running():
            if worker.process is not None:
                self._unwatch(worker.process.fd)
                worker.process.close()
                worker.process = None

    # --- in the driver's thread

    def _list(self, *, scan: bool) -> list[Instance]:
        self._workers.refresh(scan=scan)
        if scan:
            self._workers.tidy(now=self.context.clock.time())
        return self._workers.instances()

    def _check(self) -> list[Finding]:
        return [self._check_command(), self._check_cwd(), self._check_state(), _check_open_files()]

    def _check_command(self) -> Finding:
        program = self._command[0]
        if shutil.which(program, path=self._options.environment.get("PATH")) is None:
            remedy = "Correct driver.options.command, or install the package that contains the program."
            return Finding("worker command", ok=False, message=f"{program} is not an executable file.", remedy=remedy)
        return Finding("worker command", ok=True, message=f"Workers are started by {program}.")

    def _check_cwd(self) -> Finding:
        cwd = Path(self._options.cwd or ".")
        if not cwd.is_dir():
            remedy = "Create it, or correct driver.options.cwd."
            return Finding("worker directory", ok=False, message=f"{cwd} is not a directory.", remedy=remedy)
        return Finding("worker directory", ok=True, message=f"Workers run in {cwd.absolute()}.")

    def _check_state(self) -> Finding:
        try:
            self._state.prepare()
        except DriverUnavailableError as error:
            return Finding("state directory", ok=False, message=error.message)
        return Finding("state directory", ok=True, message=f"Workers are recorded in {self._state.path}.")

    # --- in the event loop

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the driver's thread, then update the set of watched processes."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except OSError as error:  # of `/proc`; errors of files and of starts are translated where they occur
            raise unavailable(error) from error
        finally:
            self._forget_ended()
            self._watch_running()

    async def _call_for(self, instance_id: InstanceId, function: Callable[[], T]) -> T:
        """Like `_call`, for one instance. Lists first if it is unknown, as after a restart of the controller."""

        def call() -> T:
            if self._workers.find(instance_id) is None:
                self._workers.refresh(scan=False)
            return function()

        return await self._call(call)

    async def _has_gone(self, worker: LocalWorker, *, within: float) -> bool:
        process = worker.process
        gone = None if process is None else self._watches.get(process.fd)
        if gone is None:
            return True
        try:
            async with asyncio.timeout(within):
                await gone.wait()
        except TimeoutError:
            return False
        return True

    def _watch_running(self) -> None:
        """Watch the pidfds of new workers: a pidfd is readable once its process has ended."""
        loop = asyncio.get_running_loop()
        for worker in self._workers.running():
            process = worker.process
            if process is not None and process.fd not in self._watches:
                self._watches[process.fd] = asyncio.Event()
                loop.add_reader(process.fd, self._process_ended, process.fd)

    def _process_ended(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)  # it stays readable
        self._watches[fd].set()
        self._changed()

    def _forget_ended(self) -> None:
        while self._workers.ended:
            process = self._workers.ended.popleft()
            self._unwatch(process.fd)
            process.close()

    def _unwatch(self, fd: int) -> None:
        gone = self._watches.pop(fd, None)
        if gone is not None:
            asyncio.get_running_loop().remove_reader(fd)
            gone.set()

    def _changed(self) -> None:
        self._changes.set(self._changes.value + 1)


def _check_open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = limit == resource.RLIM_INFINITY or limit >= 1024
    message = f"The limit of open files is {limit}; every worker needs one."
    remedy = None if enough else "Raise it (ulimit -n, LimitNOFILE)."
    return Finding("open files", ok=enough, message=message, remedy=remedy, fatal=False)

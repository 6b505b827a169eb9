"""The workers of one pool on this host: starts them, finds them, records their end. The blocking half of the driver.

Called by `SubprocessDriver` from one thread only. The table of workers is a cache of the state directory and of the
processes; `refresh` updates it, also with the changes of an earlier or another controller.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil

from osrdyne.drivers.base import Exit, Instance, InstanceId, InstanceState, WorkerSpec
from osrdyne.drivers.subprocess.environment import Marks, carries_mark, worker_variables
from osrdyne.drivers.subprocess.launch import Launch, spawn, start_error
from osrdyne.drivers.subprocess.logs import LogFiles
from osrdyne.drivers.subprocess.processes import (
    ProcessHandle,
    ancestors,
    ask_all_to_end,
    boot_id,
    environment_of,
    kill_all,
    members,
    session_leaders,
)
from osrdyne.drivers.subprocess.state import Record, StateDirectory, slot_name
from osrdyne.errors import DriverError, DriverUnavailableError, SlotTakenError
from osrdyne.logs import get_logger
from osrdyne.protocol.names import WorkerId

log = get_logger("drivers.subprocess")

# Seconds that the other processes of an ended worker get to end by themselves: Spark's JVM deletes temporary files.
_LEFTOVER_GRACE = 1.0

_REBOOTED = Exit(reason="the host was restarted")
_UNSEEN = Exit(reason="exit code unknown: it was started by an earlier controller")


@dataclass(slots=True)
class LocalWorker:
    """One worker: its record, and its main process as long as that runs.

    `lingering`: it has ended, but a process that it started cannot be killed.
    """

    name: str
    record: Record
    process: ProcessHandle | None
    asked_to_stop: bool = False
    killed: bool = False
    lingering: bool = False

    @property
    def instance_id(self) -> InstanceId:
        return InstanceId(f"{self.record.pid}-{self.record.ticks}")

    def to_instance(self) -> Instance:
        record = self.record
        running = InstanceState.STOPPING if record.stopping or self.lingering else InstanceState.RUNNING
        return Instance(
            instance_id=self.instance_id,
            key=record.key,
            slot=record.slot,
            worker_id=record.worker_id,
            state=running if record.exit is None else InstanceState.EXITED,
            spec_hash=record.spec_hash,
            started_at=record.started_at,
            external_id=str(record.pid),
            exit=record.exit,
        )


class LocalWorkers:
    """The table of workers, by slot name. `ended` collects the handles that the driver is to close."""

    def __init__(self, state: StateDirectory, logs: LogFiles, launch: Launch) -> None:
        self.ended: deque[ProcessHandle] = deque()
        self._state = state
        self._logs = logs
        self._launch = launch
        self._workers: dict[str, LocalWorker] = {}

    def running(self) -> list[LocalWorker]:
        """The workers with an open process handle. May be called from any thread."""
        return [worker for worker in list(self._workers.values()) if worker.process is not None]

    def instances(self) -> list[Instance]:
        return [worker.to_instance() for worker in self._workers.values()]

    def find(self, instance_id: InstanceId) -> LocalWorker | None:
        return next((worker for worker in self._workers.values() if worker.instance_id == instance_id), None)

    # --- observing

    def refresh(self, *, scan: bool) -> None:
        """Update the table from the records, and with `scan` from all processes of the host.

        Raises `DriverUnavailableError` if it may be incomplete.
        """
        self._state.prepare()
        records = self._state.records()
        # Records are the truth, and the table a copy: another controller may have removed some.
        for name in self._workers.keys() - records.keys():
            self._lose(name)
        unplaced = {name for name, record in records.items() if not self._place(name, record)}
        # A record without a process: its controller died between start and record, and the worker may run.
        if scan or unplaced:
            self._adopt_unwritten()
        unfinished = [name for name in unplaced if name not in self._workers and not self._forget_if_free(name)]
        # Before an error is raised, so that the ends of other workers are recorded.
        self.settle()
        if unfinished:
            # An incomplete listing must be an error: a missing worker would be started a second time.
            names = ", ".join(unfinished)
            raise DriverUnavailableError(f"Another controller is starting a worker in {names}; list again.")

    def settle(self) -> None:
        """Record the end of every worker that has ended, after its other processes were killed.

        A worker with a process that cannot be killed (it waits for a disk) keeps its slot, and delays no other worker.
        """
        ended = [worker for worker in self._workers.values() if _has_ended(worker)]
        if fresh := [worker for worker in ended if not worker.lingering]:
            ask_all_to_end(self._others_of(fresh), grace=_LEFTOVER_GRACE)
        for worker in ended:
            if self._kill_others_of(worker):
                self._note_end(worker)

    def tidy(self, *, now: float) -> None:
        """Rotate large logs, and delete those of slots that have long been unused."""
        rotations = [partial(self._logs.rotate, worker.name) for worker in self.running()]
        failed: list[OSError] = []
        # Each by itself: on a full disk no log can be rotated, but deleting unused ones frees space.
        for work in (*rotations, partial(self._logs.purge, keep=self._workers.keys(), now=now)):
            try:
                work()
            except OSError as error:
                failed.append(error)
        if failed:
            first = failed[0]
            log.warning("worker log rotation failed", path=first.filename, error=first.strerror, failures=len(failed))

    def tail(self, instance_id: InstanceId, *, lines: int) -> tuple[str, ...]:
        worker = self.find(instance_id)
        if worker is None:
            return ()
        try:
            return self._logs.tail(worker.name, lines=lines, since=worker.record.started_at)
        except OSError as error:
            raise DriverUnavailableError(f"Cannot read the log {error.filename}: {error.strerror}.") from error

    # --- changes

    def start(self, spec: WorkerSpec, *, now: float) -> Instance:
        """Take the slot and start its worker. The errors are those of `Driver.start`."""
        self._state.prepare()
        name = slot_name(spec.key, spec.slot)
        # The worker inherits the lock: it is held as long as the worker runs, also after the daemon has ended.
        lock = self._state.lock(name)
        if lock is None:
            raise _slot_taken(spec)
        try:
            # Checked under the lock. A worker that has ended keeps its slot until its end is recorded.
            if self._state.has_record(name):
                raise _slot_taken(spec)
            record = Record(
                key=spec.key,
                slot=spec.slot,
                worker_id=spec.worker_id,
                spec_hash=spec.spec_hash or self._launch.spec_hash,
                generation=str(spec.generation),
                started_at=now,
                boot_id=boot_id(),
            )
            worker = self._start_in(name, record, spec, lock)
        finally:
            os.close(lock)  # the worker has its own copy
        return worker.to_instance()

    def ask_to_stop(self, instance_id: InstanceId) -> LocalWorker | None:
        """Send SIGTERM to the worker's main process, once; None when there is nothing to stop."""
        worker = self.find(instance_id)
        if worker is None or worker.record.exit is not None:
            return None
        if worker.process is not None and not worker.asked_to_stop:
            # Written before the signal. Crash in between: the next leader sees it as stopping, and stops it again.
            record = replace(worker.record, stopping=True)
            self._state.write(worker.name, record)
            worker.record = record
            worker.process.send(signal.SIGTERM)
            worker.asked_to_stop = True
        return worker

    def kill(self, worker: LocalWorker) -> None:
        """Kill every process of the worker."""
        process = worker.process
        if process is None:
            return
        worker.killed = True
        others = self._others_of([worker])
        kill_all(lambda: others() | (set() if process.is_gone() else {process.pid}))

    def remove(self, instance_id: InstanceId) -> None:
        """Free the slot of a worker that has ended."""
        self._state.prepare()
        worker = self.find(instance_id)
        if worker is None or worker.record.exit is None:
            return
        lock = self._state.lock(worker.name)
        if lock is None:
            raise DriverUnavailableError(f"The slot {worker.name} is still held by a process of the previous worker.")
        try:
            # No start takes the slot as long as the record exists.
            self._state.forget(worker.name)
        finally:
            os.close(lock)
        del self._workers[worker.name]

    # --- internals

    def _kill_others_of(self, worker: LocalWorker) -> bool:
        """Kill the other processes of an ended worker; False if one does not end. Only the first call waits for it."""
        try:
            kill_all(self._others_of([worker]), patient=not worker.lingering)
        except DriverUnavailableError as error:
            if not worker.lingering:
                record = worker.record
                log.warning("ended worker keeps its slot", key=record.key, worker_id=record.worker_id, error=str(error))
            worker.lingering = True
            return False
        worker.lingering = False
        return True

    def _note_end(self, worker: LocalWorker) -> None:
        end = self._end_of(worker)
        worker.record = replace(worker.record, exit=end)
        self._state.write(worker.name, worker.record)
        # After the end was recorded. A crash in between: the secret is deleted with the record.
        self._state.forget_secret(worker.name)
        self._release(worker)
        log.debug("worker ended", key=worker.record.key, worker_id=worker.record.worker_id, end=str(end))

    def _lose(self, name: str) -> None:
        """Handle a known worker whose record is gone: drop it, or write the record again if the worker runs."""
        worker = self._workers[name]
        if worker.process is not None and not worker.process.is_gone():
            # Without its record the slot would count as free.
            self._state.write(name, worker.record)
        else:
            self._release(self._workers.pop(name))

    def _place(self, name: str, record: Record | None) -> bool:
        """Update the table from a record; False if the record names no process."""
        known = self._workers.get(name)
        if record is None or record.pid is None:
            if known is not None:
                self._lose(name)
            return name in self._workers
        if known is not None and (known.record.pid, known.record.ticks) == (record.pid, record.ticks):
            known.record = record
            if record.exit is not None:
                self._release(known)
            return True
        if known is not None:
            self._release(known)
        process = None
        # After a reboot of the host the pid may belong to any other process.
        if record.exit is None and record.boot_id == boot_id():
            process = ProcessHandle.open(record.pid, record.ticks)
        self._workers[name] = LocalWorker(name, record, process)
        return True

    def _adopt_unwritten(self) -> None:
        """Adopt workers that run although no record names their process: their controller died before it wrote it, or
        the state directory was deleted."""
        for pid in session_leaders():  # oldest first: a worker comes before the processes that it started
            variables = environment_of(pid)
            marks = None if variables is None else Marks.from_variables(variables, self._state.path)
            # Children inherit the marks. Only the worker itself is adopted.
            if marks is None or self._belongs_to_a_worker(pid, marks.worker_id):
                continue
            process = ProcessHandle.open(pid)
            if process is not None:
                self._adopt(marks, process)

    def _belongs_to_a_worker(self, pid: int, worker_id: WorkerId) -> bool:
        """Whether the process is a known worker, or was started by one: a child may lead a session, too."""
        if any(
            worker.record.worker_id == worker_id and worker.record.exit is None for worker in self._workers.values()
        ):
            return True
        return not ancestors(pid).isdisjoint(worker.record.pid for worker in self._alive())

    def _adopt(self, marks: Marks, process: ProcessHandle) -> None:
        try:
            started_at = psutil.Process(process.pid).create_time()
        except psutil.NoSuchProcess:
            started_at = None
        if started_at is None or process.is_gone():
            # It has ended since its environment was read.
            process.close()
            return
        name = slot_name(marks.key, marks.slot)
        if name in self._workers:  # its record was deleted, and the slot was filled again: both workers are listed
            name = f"{name}.{marks.worker_id}"
        record = Record(
            key=marks.key,
            slot=marks.slot,
            worker_id=marks.worker_id,
            spec_hash=marks.spec_hash,
            generation=marks.generation,
            started_at=started_at,
            boot_id=boot_id(),
            pid=process.pid,
            ticks=process.ticks,
        )
        # Into the table first: if the write fails, the next listing writes the record, and the handle is not lost.
        self._workers[name] = LocalWorker(name, record, process)
        self._state.write(name, record)
        log.info("worker adopted", key=record.key, worker_id=record.worker_id, pid=record.pid)

    def _forget_if_free(self, name: str) -> bool:
        """Delete the record of a start that ended before it had a process; False while the lock of the slot is held."""
        lock = self._state.lock(name)
        if lock is None:
            return False
        try:
            self._state.forget(name)
        finally:
            os.close(lock)
        return True

    def _start_in(self, name: str, record: Record, spec: WorkerSpec, lock: int) -> LocalWorker:
        in_environment = self._launch.uri_in_environment
        uri_file = None if in_environment else self._state.write_secret(name, spec.environment.amqp_uri)
        self._state.write(name, record)
        marks = Marks(self._state.path, record.key, record.slot, record.worker_id, record.spec_hash, record.generation)
        variables = worker_variables(
            spec,
            marks,
            daemon=os.environb,
            inherit=self._launch.inherit,
            extra=self._launch.environment,
            uri_file=uri_file,
        )
        try:
            pid = self._launch_in(name, variables, lock)
        except DriverError:
            # Nothing was started: the slot is free again at once.
            self._state.forget(name)
            raise
        process = ProcessHandle.open(pid)
        if process is None:
            raise DriverUnavailableError("The worker process ended while it was being started.")
        record = replace(record, pid=pid, ticks=process.ticks)
        # Into the table first: if the write fails, the next listing writes the record, and the handle is not lost.
        worker = self._workers[name] = LocalWorker(name, record, process)
        # Crash before this is written: the next listing finds the worker by its marks.
        self._state.write(name, record)
        return worker

    def _launch_in(self, name: str, variables: Mapping[bytes, bytes], lock: int) -> int:
        try:
            output = self._logs.open_new(name)
        except OSError as error:
            raise start_error(error, subject=str(self._logs.path(name)), option="log_directory") from error
        try:
            return spawn(self._launch, variables, output=output, lock=lock)
        except OSError as error:
            option = "cwd" if error.filename == self._launch.cwd else "command"
            raise start_error(error, subject=self._launch.command[0], option=option) from error
        finally:
            os.close(output)

    def _others_of(self, workers: Sequence[LocalWorker]) -> Callable[[], set[int]]:
        """A function that lists the processes of these workers, except their main processes.

        If another worker with one of their ids runs, the processes with that id belong to it, and are left out.
        """
        others = {worker.record.worker_id for worker in self._alive() if worker not in workers}
        worker_ids = frozenset(worker.record.worker_id for worker in workers) - others
        leaders = [worker.process for worker in workers if worker.process is not None]
        main = {worker.process.pid for worker in self.running() if worker.process is not None}

        def list_pids() -> set[int]:
            found = members(
                leaders, carries_mark=lambda variables: carries_mark(variables, self._state.path, worker_ids)
            )
            return found - main

        return list_pids

    def _alive(self) -> list[LocalWorker]:
        return [worker for worker in self.running() if not _has_ended(worker)]

    def _end_of(self, worker: LocalWorker) -> Exit:
        end = worker.process.reap() if worker.process is not None else None
        if end is None:
            return _UNSEEN if worker.record.boot_id == boot_id() else _REBOOTED
        if end.signal == "SIGKILL":
            reason = (
                "it did not stop in time" if worker.killed else "killed from outside, or the host ran out of memory"
            )
            return replace(end, reason=reason)
        return end

    def _release(self, worker: LocalWorker) -> None:
        process, worker.process = worker.process, None
        if process is not None:
            self.ended.append(process)


def _has_ended(worker: LocalWorker) -> bool:
    return worker.record.exit is None and (worker.process is None or worker.process.is_gone())


def _slot_taken(spec: WorkerSpec) -> SlotTakenError:
    return SlotTakenError("A worker of this key and slot exists already.", key=spec.key, slot=spec.slot)

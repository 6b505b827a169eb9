"""The workers of one pool on this host: starts them, finds them, notices their end. The blocking half of the driver.

Called by `SubprocessDriver` from one thread only. What it knows is a cache of the state directory and of the processes;
`refresh` brings it up to date, also with what an earlier or another controller did.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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

# Seconds for what a worker has left behind to end by itself: Spark's JVM deletes its temporary files then.
_LEFTOVER_GRACE = 1.0

_REBOOTED = Exit(reason="the host was restarted")
_UNSEEN = Exit(reason="exit code unknown: it was started by an earlier controller")


@dataclass(slots=True)
class LocalWorker:
    """One worker: what is written down of it, and its process for as long as that runs.

    `lingering`: it has ended, but something that it has started cannot be killed.
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
    """The table of workers, by slot name. `ended` collects handles that can be closed."""

    def __init__(self, state: StateDirectory, logs: LogFiles, launch: Launch) -> None:
        self.ended: deque[ProcessHandle] = deque()
        self._state = state
        self._logs = logs
        self._launch = launch
        self._workers: dict[str, LocalWorker] = {}

    def running(self) -> list[LocalWorker]:
        """Those whose process is being watched; may be called from any thread."""
        return [worker for worker in list(self._workers.values()) if worker.process is not None]

    def instances(self) -> list[Instance]:
        return [worker.to_instance() for worker in self._workers.values()]

    def find(self, instance_id: InstanceId) -> LocalWorker | None:
        return next((worker for worker in self._workers.values() if worker.instance_id == instance_id), None)

    # --- what is there

    def refresh(self, *, scan: bool) -> None:
        """Bring the table up to date. `scan`: look at all processes of the host too, not only at what is written down.

        Raises `DriverUnavailableError` when it cannot be complete.
        """
        self._state.prepare()
        records = self._state.records()
        # Records are the truth, and the table a copy: another controller may have removed some.
        for name in self._workers.keys() - records.keys():
            self._lose(name)
        unplaced = {name for name, record in records.items() if not self._place(name, record)}
        # A record without a process: the worker may run, its controller died between start and record.
        if scan or unplaced:
            self._adopt_unwritten()
        unfinished = [name for name in unplaced if name not in self._workers and not self._forget_if_free(name)]
        # Before an error is raised: the ends of other workers are recorded anyway.
        self.settle()
        if unfinished:
            # An incomplete listing must be an error: a missing worker would be started a second time.
            raise DriverUnavailableError("Another process is starting a worker; list again soon.")

    def settle(self) -> None:
        """Write down the end of every worker that has ended, after the rest of its processes was killed.

        One whose rest cannot be killed (a disk that does not answer) keeps its slot, and delays no other.
        """
        ended = [worker for worker in self._workers.values() if _has_ended(worker)]
        if fresh := [worker for worker in ended if not worker.lingering]:
            ask_all_to_end(self._others_of(fresh), grace=_LEFTOVER_GRACE)
        for worker in ended:
            if self._kill_others_of(worker):
                self._note_end(worker)

    def tidy(self, *, now: float) -> None:
        """Rotate logs that have grown, and delete those that are not needed any more."""
        try:
            for worker in self.running():
                self._logs.rotate(worker.name)
            self._logs.purge(keep=self._workers.keys(), now=now)
        except OSError as error:
            log.warning("worker log rotation failed", path=error.filename, error=error.strerror)

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
            # Asked under the lock. The worker may have ended; its end must be recorded before the slot is free.
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
        self._workers[name] = worker
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
            # As long as the record is there, no start takes the slot.
            self._state.forget(worker.name)
        finally:
            os.close(lock)
        del self._workers[worker.name]

    # --- parts

    def _kill_others_of(self, worker: LocalWorker) -> bool:
        """Kill what an ended worker has left behind; False when that does not end. Waits for it the first time only."""
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
        # After the end is written down: the secret is of no more use.
        self._state.forget_secret(worker.name)
        self._release(worker)
        log.debug("worker ended", key=worker.record.key, worker_id=worker.record.worker_id, end=str(end))

    def _lose(self, name: str) -> None:
        """The record of a known worker is gone: removed by another controller, or by mistake while the worker runs."""
        worker = self._workers[name]
        if worker.process is not None and not worker.process.is_gone():
            # The worker runs: without its record its slot would count as free.
            self._state.write(name, worker.record)
        else:
            self._release(self._workers.pop(name))

    def _place(self, name: str, record: Record | None) -> bool:
        """Take a record into the table; False when it does not say which process it is about."""
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
        # After a restart of the host the pid may belong to any other process.
        if record.exit is None and record.boot_id == boot_id():
            process = ProcessHandle.open(record.pid, record.ticks)
        self._workers[name] = LocalWorker(name, record, process)
        return True

    def _adopt_unwritten(self) -> None:
        """Find workers that run although no record names their process: their controller died at that moment, or
        the state directory was deleted."""
        for pid in session_leaders():  # oldest first, and so a worker before what it has started
            variables = environment_of(pid)
            marks = None if variables is None else Marks.from_variables(variables, self._state.path)
            # Children inherit the marks: only the worker itself is adopted, what it has started belongs to it.
            if marks is None or self._belongs_to_a_worker(pid, marks.worker_id):
                continue
            process = ProcessHandle.open(pid)
            if process is not None:
                self._adopt(marks, process)

    def _belongs_to_a_worker(self, pid: int, worker_id: WorkerId) -> bool:
        """Whether it is a known worker, or was started by one: a child inherits the marks, and may lead a session."""
        if any(
            worker.record.worker_id == worker_id and worker.record.exit is None for worker in self._workers.values()
        ):
            return True
        return not ancestors(pid).isdisjoint(worker.record.pid for worker in self._alive())

    def _adopt(self, marks: Marks, process: ProcessHandle) -> None:
        if process.is_gone():
            # It has ended since its environment was read.
            process.close()
            return
        name = slot_name(marks.key, marks.slot)
        if name in self._workers:  # its record was deleted, and the slot filled again: both are listed, one is surplus
            name = f"{name}.{marks.worker_id}"
        record = Record(
            key=marks.key,
            slot=marks.slot,
            worker_id=marks.worker_id,
            spec_hash=marks.spec_hash,
            generation=marks.generation,
            started_at=psutil.Process(process.pid).create_time(),
            boot_id=boot_id(),
            pid=process.pid,
            ticks=process.ticks,
        )
        self._state.write(name, record)
        self._workers[name] = LocalWorker(name, record, process)
        log.info("worker adopted", key=record.key, worker_id=record.worker_id, pid=record.pid)

    def _forget_if_free(self, name: str) -> bool:
        """Drop the record of a start that was cut short before there was a process; False while its lock is held."""
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
            raise DriverUnavailableError("A worker process vanished while it was being started.")
        # Crash before this is written: the worker is found by its marks in the next scan.
        record = replace(record, pid=pid, ticks=process.ticks)
        self._state.write(name, record)
        return LocalWorker(name, record, process)

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
        """What lists the processes of these workers that are not their main ones.

        A worker id that another main process lives under is that one's: its processes are not to be touched.
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

"""The pooled driver: starts the workers of many keys inside a few processes of another driver.

For the pool it is an ordinary driver: a worker assigned to a process is an instance like any other. A *process* is an
instance of the inner driver with the key `PROCESS_KEY`. The driver decides nothing about groups; it chooses the process
for a worker. Which workers exist is recorded in the processes only: in a new term the driver queries every process, and
places no worker until each process has answered or was killed. Source: docs/explanation/placement.md.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from osrdyne.aio.signals import Wakeup, WatchCell
from osrdyne.aio.tasks import off_loop
from osrdyne.drivers.base import (
    Driver,
    DriverOptions,
    Finding,
    Instance,
    InstanceId,
    InstanceState,
    WorkerSpec,
    hash_options,
)
from osrdyne.drivers.pooled import placement
from osrdyne.drivers.pooled.link import ProcessLink
from osrdyne.drivers.pooled.log_lines import lines_of_worker, lines_to_search
from osrdyne.drivers.pooled.memory import MemoryPressure, Shortage
from osrdyne.drivers.pooled.placement import PooledRules, ProcessDeaths, ProcessSettings
from osrdyne.drivers.pooled.process import Process, Starting, split_id
from osrdyne.errors import (
    DriverError,
    DriverUnavailableError,
    SlotTakenError,
    StartFailedError,
)
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.environment import Placement
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.pooled import (
    PROCESS_KEY,
    Assign,
    Assignment,
    AssignmentState,
    Forget,
    ProcessState,
    Question,
    Release,
    ReportState,
)

ASSIGN_ATTEMPTS = 3
"""The number of processes that may refuse a worker before its start fails."""
LOG_LINES = 20
MAX_EARLY = 100
"""The maximum number of unlisted processes whose reports are stored."""


class ProcessSilentError(DriverUnavailableError):
    """A process did not answer within `process_timeout`."""


class ProcessGoneError(DriverUnavailableError):
    """A process ended before it answered."""


@dataclass(slots=True, eq=False)
class WaitingStart:
    """A start that waits for a place in a process. `place`: the process, or the error of the start."""

    worker_id: WorkerId
    key: Key
    alone: bool
    settings_hash: str
    place: asyncio.Future[Process] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PooledDriver(Driver):
    """Places workers in the processes of `inner`. The leader's term passes the reports of processes to `take_state`;
    `PooledUpkeep` starts, ends and replaces processes during a term."""

    name: ClassVar[str] = "pooled"

    def __init__(self, inner: Driver, rules: PooledRules) -> None:
        super().__init__(DriverOptions(), inner.context)
        self.inner = inner
        self.rules = rules
        self.same_host = inner.same_host
        self.processes: dict[WorkerId, Process] = {}
        self.waiting: list[WaitingStart] = []
        self.pressure = MemoryPressure(rules.max_memory_used)
        self.deaths = ProcessDeaths(inner.context.clock)
        self.begun: dict[WorkerId, tuple[int, str]] = {}
        """For each unfinished start of a process: the term that began it, and the hash of its settings."""
        self.failed_starts: Counter[str] = Counter()
        """The number of consecutive processes that ended before they were ready, by the hash of their settings."""
        self.settings: dict[str, ProcessSettings] = {}
        """The settings of processes that the pool has, by hash."""
        self._by_worker_hash: dict[str, str] = {}
        self.wakeup = Wakeup(inner.context.clock)
        """Set whenever processes may have to be started or ended."""
        self._clock = inner.context.clock
        self._link: ProcessLink | None = None
        self.listed_at = -math.inf
        """When the inner driver was last called to list its instances (monotonic)."""
        self._listed_in: int | None = None
        self._early_reports: dict[WorkerId, ProcessState] = {}
        self._dedicated: list[Instance] = []
        self._refreshing = asyncio.Lock()
        self._starting_slots: set[tuple[Key, int]] = set()
        self._changes = WatchCell(0)
        self._log: Logger = get_logger("pooled_driver", pool=inner.context.pool)
        self.use_settings([ProcessSettings(inner.spec_hash(), rules.spares)])

    def use_settings(self, settings: Iterable[ProcessSettings]) -> None:
        """Use these settings of processes from now on. Processes with other ones take no more workers."""
        self.settings = {one.hash: one for one in settings}
        self._by_worker_hash = {worker_hash(one): one for one in self.settings}
        for process in self.processes.values():
            process.is_outdated = process.settings_hash not in self.settings
        for waiting in self.waiting:
            if waiting.settings_hash not in self.settings and not waiting.place.done():
                # The pool makes another specification, with the settings that the group has now.
                waiting.place.set_exception(DriverUnavailableError("The settings of the group have changed."))
        self.changed()

    # --- the term

    def begin_term(self, link: ProcessLink) -> None:
        """Use the link of a new term. Earlier reports of a process count only once it has answered this term."""
        # Nothing is listed in this term yet: the first start or listing queries all processes (lifecycle:
        # pooled-ask-first).
        self._link, self._listed_in = link, None

    def end_term(self) -> None:
        """End the term: stop sending, and end the calls that wait for an answer."""
        self._link = None
        for process in self.processes.values():
            process.wake()

    @property
    def link(self) -> ProcessLink:
        """The link of the current term. Raises `DriverUnavailableError` between two terms."""
        if self._link is None:
            raise DriverUnavailableError("Processes are reached only while this daemon leads its pool.")
        return self._link

    def take_state(self, worker_id: WorkerId, state: ProcessState) -> None:
        """Apply a report of a process. If the start of the process has not returned yet, apply the report when it
        returns."""
        process = self.processes.get(worker_id)
        if process is None:
            # The report may come before the start has returned. Reports of unknown processes must not fill the memory.
            if len(self._early_reports) < MAX_EARLY:
                self._early_reports[worker_id] = state
            return
        if process.is_gone:
            # The inner driver has listed its end: a late report must not list its workers as running again.
            return
        term = 0 if self._link is None else self._link.term
        if state.ready:
            self.failed_starts.pop(process.settings_hash, None)
        before = process.workers()
        self._blame_ends(process, state)
        # An older report changes nothing, but may answer a question (lifecycle: pooled-sequence).
        if process.apply(state, term=term, now=self._clock.monotonic()):
            self.changed(relist=process.workers() != before)

    def _blame_ends(self, process: Process, state: ProcessState) -> None:
        """Blame the keys whose workers have failed by themselves while they ran a suspect: with the JVM, for example,
        before the process ends."""
        for worker in state.assignments:
            known = process.assignment(worker.worker_id)
            if known is None or known.state is AssignmentState.EXITED or worker.state is not AssignmentState.EXITED:
                continue
            if worker.exit is not None and worker.exit.code and self._runs_suspect(worker.worker_id):
                self.deaths.blame(worker.key)

    def _runs_suspect(self, worker_id: WorkerId) -> bool:
        return self._link is not None and self._link.runs_suspect(worker_id)

    def _loads(self, worker_id: WorkerId) -> bool:
        return self._link is not None and self._link.loads(worker_id)

    @property
    def starts_workers(self) -> bool:
        """Whether workers are being assigned, load their data, or run suspects that the end of a process has left."""

        def starts(process: Process) -> bool:
            workers = [worker.worker_id for worker in process.assignments()]
            return any(self._loads(worker) or self._runs_suspect(worker) for worker in workers)

        processes = running(self.processes.values())
        return any(process.reserved or process.starting or starts(process) for process in processes)

    def is_process(self, worker_id: WorkerId) -> bool:
        """Whether it is the id of a process; includes processes whose start has not returned."""
        return worker_id in self.processes or worker_id in self.begun

    def process_ids(self) -> set[WorkerId]:
        """The processes that have not ended: their credentials are in use."""
        return {process.worker_id for process in running(self.processes.values())}

    def changed(self, *, relist: bool = True) -> None:
        """React to new facts about a process: waiting starts may find a place. `relist`: listings may differ from
        earlier ones."""
        for process in self.processes.values():
            empty = process.is_ready and process.load == 0
            process.empty_since = (process.empty_since or self._clock.monotonic()) if empty else None
            if empty:
                process.alone = None
        begun, over = self.pressure.update(self.processes.values())
        for scope in begun:
            self._log.warning("memory is short", scope=scope, limit=self.rules.max_memory_used)
        for scope in over:
            self._log.info("memory is no longer short", scope=scope)
        self._serve_waiting()
        self.wakeup.set()
        if relist:
            self._changes.set(self._changes.value + 1)

    # --- the interface of drivers

    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        # Dedicated workers of the same settings have another hash, so that a change of the placement replaces them.
        return worker_hash(self.inner.spec_hash() if config is None else self.inner.spec_hash(config))

    async def list_instances(self) -> list[Instance]:
        await self.refresh()
        await self._require_reports()
        workers = [worker for process in self.processes.values() for worker in process.workers()]
        return [*self._dedicated, *workers]

    async def start(self, spec: WorkerSpec) -> Instance:
        began = self._clock.monotonic()
        # A process of the earlier leader may hold this very key: it must be known before another one is chosen.
        if self._listed_in != self.link.term:
            await self.refresh()
        await self._require_reports()
        # All processes have answered by now, so that no other one can hold this slot without being listed.
        self._require_free(spec)
        slot = (spec.key, spec.slot)
        # No await since the check: two starts of one slot cannot both pass it.
        self._starting_slots.add(slot)
        try:
            if spec.placement is Placement.DEDICATED:
                return await self._start_dedicated(spec)
            instance = await self._start_somewhere(spec)
        finally:
            self._starting_slots.discard(slot)
        self.link.note_assigned(self._clock.monotonic() - began)
        self.changed()
        return instance

    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        found = split_id(instance_id)
        if found is None:
            return await self.inner.stop(instance_id, grace=grace)
        name, worker_id = found
        process = await self._find(name)
        if process is None or not process.runs(worker_id):
            return
        # Listed as stopping before the message is sent: a bind must wait for it (lifecycle: bind-waits-for-stop).
        process.stopping.add(worker_id)
        self.changed()
        release = Release(_new_question(), worker_id, grace)
        self._log_worker("worker is released", process, worker_id)
        try:
            await self._until_ended(process, release)
        except ProcessSilentError:
            await self.kill(process, "it did not answer")
        except ProcessGoneError:
            pass  # its workers have ended with it
        finally:
            process.stopping.discard(worker_id)
            self.changed()

    async def remove(self, instance_id: InstanceId) -> None:
        found = split_id(instance_id)
        if found is None:
            return await self.inner.remove(instance_id)
        name, worker_id = found
        process = await self._find(name)
        if process is None or process.worker(worker_id) is None or process.runs(worker_id):
            return
        # If the leader dies before the answer, the exited worker stays in the list, and the next leader removes it.
        # The worker has exited, and the pool has recorded its end (lifecycle: pooled-forget-after-exit).
        forget = Forget(_new_question(), worker_id)
        self._log_worker("worker is forgotten", process, worker_id)
        while not process.is_gone and process.assignment(worker_id) is not None:
            with suppress(ProcessGoneError):
                await self._ask(process, forget)
        # Also for a process that has ended: its last report still contains the worker.
        process.removed.add(worker_id)
        process.starting.pop(worker_id, None)
        self.changed()

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        """The last lines of the worker: those that its process reports, otherwise those in the log of the process that
        name the worker. Never lines of other keys: the caller may be limited to this one."""
        found = split_id(instance_id)
        if found is None:
            return await self.inner.logs(instance_id, lines=lines)
        name, worker_id = found
        process = await self._find(name)
        if process is None or lines <= 0:
            return ()
        worker = process.assignment(worker_id)
        ended_with_process = process.is_gone and worker is not None and worker.state is not AssignmentState.EXITED
        if worker is not None and worker.log_lines and not ended_with_process:
            return worker.log_lines[-lines:]
        written = await self.inner.logs(process.instance.instance_id, lines=lines_to_search(lines))
        own = await off_loop(sum(map(len, written)), lines_of_worker, written, worker_id)
        return own[-lines:]

    async def process_logs(self, worker_id: WorkerId, *, lines: int) -> tuple[str, ...]:
        """The last lines of a process, of all its keys."""
        process = self.processes.get(worker_id)
        return () if process is None else await self.inner.logs(process.instance.instance_id, lines=lines)

    async def events(self) -> AsyncIterator[None]:
        seen = self._changes.value
        inner = asyncio.ensure_future(self._watch_inner())
        change: asyncio.Future[int] | None = None
        try:
            while True:
                if self._changes.value == seen:
                    change = asyncio.ensure_future(self._changes.changed())
                    await asyncio.wait({inner, change}, return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
                    if inner.done():
                        inner.result()
                        return
                seen = self._changes.value
                yield
        finally:
            inner.cancel()
            if change is not None:
                change.cancel()

    def crowded(self) -> list[list[Assignment]]:
        """For each process that uses more than `max_heap_used` of its heap and has more than one worker: its workers
        without requests, the least recently used first."""
        return [
            _idle_workers([process])
            for process in running(self.processes.values())
            if process.load > 1 and process.heap_share >= self.rules.max_heap_used
        ]

    def full(self) -> list[list[Assignment]]:
        """For each settings for which starts wait because all processes are up and theirs are full: the workers there
        without requests, the least recently used first."""
        found = placement.full_processes(running(self.processes.values()), self._waiting_starts(), self.rules)
        return [_idle_workers(processes) for processes in found]

    def vacatable(self) -> list[list[Assignment]]:
        """If starts wait for a process and `max_processes` are up in which they have no place: the workers of each one
        that could become empty for them, because none of its workers has requests. The first one should."""
        processes = placement.processes_to_vacate(running(self.processes.values()), self._waiting_starts(), self.rules)
        return [[one for one in process.assignments() if process.runs(one.worker_id)] for process in processes]

    def _waiting_starts(self) -> set[tuple[str, bool]]:
        """For the starts that wait: their settings, and whether they need their own process."""
        starts = [one for one in self.waiting if not one.place.done()]
        return {(one.settings_hash, self.needs_process_alone(one)) for one in starts}

    def shortages(self) -> list[Shortage]:
        """The hosts and cgroups that use more than `max_memory_used` of their memory."""
        return self.pressure.shortages(self.processes.values())

    def replace_one(self, scope: str) -> bool:
        """Replace the least loaded process of a host or cgroup that is short of memory; False if there is none whose
        end would help."""
        process = self.pressure.to_end(scope, self.processes.values(), now=self._clock.time())
        if process is None:
            return False
        process.retiring = "the memory of its host or cgroup is short"
        self._log.warning("process is replaced", process=process.worker_id, why=process.retiring, workers=process.load)
        self.changed()
        return True

    async def check(self) -> list[Finding]:
        rules = self.rules
        message = (
            f"Up to {rules.max_processes} processes with up to {rules.keys_per_process} keys each; "
            f"{rules.spares} spare processes."
        )
        return [*await self.inner.check(), Finding("pooled workers", ok=True, message=message)]

    async def close(self) -> None:
        await self.inner.close()

    # --- processes, for `PooledUpkeep` too

    async def refresh(self) -> None:
        """List the instances of the inner driver. One listing at a time: an older one must not overwrite a newer."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        self.listed_at = self._clock.monotonic()
        # Read before the listing: one that a new term overtakes must not count as that term's.
        term = None if self._link is None else self._link.term
        # Only processes that were known before the listing can have vanished.
        before = set(self.processes)
        listing = await self.inner.list_instances()
        self._dedicated = [instance for instance in listing if instance.key != PROCESS_KEY]
        listed = {instance.worker_id: instance for instance in listing if instance.key == PROCESS_KEY}
        for worker_id, instance in listed.items():
            if (process := self.processes.get(worker_id)) is None:
                self.add(instance)
            else:
                await self._take_instance(process, instance)
        # The listing lacks processes that were started while it was made.
        for worker_id in before - listed.keys():
            if (vanished := self.processes.pop(worker_id, None)) is not None:
                # Callers that wait for its answers fail with `ProcessGoneError`.
                vanished.wake()
        self._listed_in = term

    def add(self, instance: Instance) -> Process:
        """Add a process that was started or found, unless it is already known."""
        process = self.processes.get(instance.worker_id)
        if process is None:
            now = self._clock.monotonic()
            # A process of this term holds only what this term assigns to it (lifecycle: pooled-starts-with-term).
            started_in, given_hash = self.begun.pop(instance.worker_id, (None, None))
            process = Process(instance, seen_at=now, heard_at=now, started_in=started_in, given_hash=given_hash)
            process.is_outdated = process.settings_hash not in self.settings
            self.processes[instance.worker_id] = process
            if (state := self._early_reports.pop(instance.worker_id, None)) is not None:
                self.take_state(instance.worker_id, state)
        return process

    async def _take_instance(self, process: Process, instance: Instance) -> None:
        if process.instance == instance:
            return
        was_gone, process.instance = process.is_gone, instance
        if process.is_gone and not was_gone:
            await self._note_end(process)
        self.changed()

    async def _note_end(self, process: Process) -> None:
        """Record that a process has ended, and its workers with it. If it never became ready, starts that wait for it
        fail."""
        living = [worker for worker in process.assignments() if worker.state is not AssignmentState.EXITED]
        suspected = {worker.key for worker in living if self._runs_suspect(worker.worker_id)}
        if not process.closing:
            for key in suspected:
                self.deaths.blame(key)
            # Keys that ran requests or loaded their data at several such ends get a process of their own: they may be
            # the cause. A suspect is a more likely cause.
            if not suspected:
                self.deaths.note({one.key for one in living if one.in_flight > 0 or self._loads(one.worker_id)})
        # A worker with an unanswered assignment may have run: list it as exited with the process, too.
        with suppress(DriverError):
            process.log_lines = await self.inner.logs(process.instance.instance_id, lines=LOG_LINES)
        ready = process.state is not None and process.state.ready
        end = {"process": process.worker_id, "exit": str(process.instance.exit or "unknown")}
        if process.closing:
            self._log.info("process ended", **end, workers=len(process.assignments()))
        else:
            # The lines are deleted with the process, and no caller gets them if no start waits for the process.
            self._log.warning("process ended", **end, workers=len(process.assignments()), log_lines=process.log_lines)
        process.wake()
        # A process that was ready once, or was ended on purpose, is no failed start.
        if ready or process.closing:
            return
        self.failed_starts[process.settings_hash] += 1
        if self.failed_starts[process.settings_hash] >= self.rules.start_attempts:
            reason = f"A pooled process ended before it was ready: {process.instance.exit or 'unknown exit'}."
            self.fail_waiting(StartFailedError(reason, log_lines=process.log_lines), process.settings_hash)

    def fail_waiting(self, error: DriverError, settings_hash: str) -> None:
        """End all starts that wait for a process with these settings, because there will be none."""
        for waiting in self.waiting:
            if waiting.settings_hash == settings_hash and not waiting.place.done():
                waiting.place.set_exception(error)

    async def kill(self, process: Process, why: str) -> None:
        """Kill an unresponsive process. When this returns, its workers are listed as exited."""
        # A process does not answer a deposed leader (lifecycle: pooled-older-terms). Only an answer of the token
        # channel that comes after the silence shows that this leader is not deposed.
        await self.link.confirm(since=self._clock.monotonic())
        if not process.is_gone:
            self._log.warning("process killed", process=process.worker_id, why=why, workers=process.load)
        # Its workers count as exited only once the inner driver lists it as exited (lifecycle:
        # pooled-kill-the-silent).
        await self.inner.stop(process.instance.instance_id, grace=0)
        await self.refresh()

    async def ask_state(self, process: Process, *, limit: float | None = None) -> None:
        """Request a report from a process. Raises `ProcessSilentError` after `limit` seconds, and
        `ProcessGoneError`."""
        await self._ask(process, ReportState(_new_question()), limit=limit)

    # --- one worker

    def _require_free(self, spec: WorkerSpec) -> None:
        workers = [worker for process in self.processes.values() for worker in process.workers()]
        taken = {(worker.key, worker.slot) for worker in [*workers, *self._dedicated]} | self._starting_slots
        if (spec.key, spec.slot) in taken:
            raise SlotTakenError("A worker of this slot exists already.", key=spec.key, slot=spec.slot)

    async def _start_dedicated(self, spec: WorkerSpec) -> Instance:
        """Start a worker with a process of its own, in a pool whose profiles have both placements."""
        # If the leader dies after this, the next leader lists the worker.
        instance = await self.inner.start(spec)
        # Added without a listing: its slot must count as taken at once.
        self._dedicated = [one for one in self._dedicated if one.instance_id != instance.instance_id] + [instance]
        self.changed()
        return instance

    def _settings_of(self, spec: WorkerSpec) -> str:
        """The settings that a process for this worker must have, by their hash. Raises `DriverUnavailableError`."""
        found = self._by_worker_hash.get(spec.spec_hash or self.spec_hash())
        if found is None:
            raise DriverUnavailableError("The settings of the group have changed.", key=spec.key)
        return found

    async def _start_somewhere(self, spec: WorkerSpec) -> Instance:
        for _ in range(ASSIGN_ATTEMPTS):
            process = await self._wait_for_place(spec)
            try:
                instance = await self._assign(process, spec)
            finally:
                process.reserved.discard(spec.worker_id)
            if instance is not None:
                return instance
        raise DriverUnavailableError("The processes that had room for the worker refused it.")

    async def _wait_for_place(self, spec: WorkerSpec) -> Process:
        """Wait for a process with room, and reserve a place in it. Raises `StartFailedError` after `start_timeout`."""
        waiting = WaitingStart(spec.worker_id, spec.key, self.deaths.is_alone(spec.key), self._settings_of(spec))
        self.waiting.append(waiting)
        timer = self._clock.call_later(self.rules.start_timeout, lambda: self._give_up(waiting))
        try:
            self._serve_waiting()
            self.wakeup.set()
            return await waiting.place
        except BaseException:
            # Cancelled after a place was found: the place must not stay reserved.
            if waiting.place.done() and not waiting.place.cancelled() and waiting.place.exception() is None:
                waiting.place.result().reserved.discard(spec.worker_id)
            raise
        finally:
            timer.cancel()
            self.waiting.remove(waiting)

    def _give_up(self, waiting: WaitingStart) -> None:
        if not waiting.place.done():
            rules = self.rules
            reason = (
                f"at most {rules.max_processes} processes with {rules.keys_per_process} keys each may run. Raise "
                "worker.pooled.max_processes or worker.pooled.keys_per_process, or give the processes more memory."
            )
            if placement.is_shared_memory_short(self.processes.values()):
                reason = (
                    "no further one is started while the memory of the host is short (worker.pooled.max_memory_used). "
                    "Add memory, or lower the heap of the processes."
                )
            waiting.place.set_exception(
                StartFailedError(
                    f"No pooled process had room for the worker within {rules.start_timeout:g} s: {reason}"
                )
            )

    def _serve_waiting(self) -> None:
        """Give places to the waiting starts, in their order."""
        if self._link is None:
            return
        # A process that has not answered may be full of workers that an earlier leader has assigned.
        known = [process for process in self.processes.values() if process.is_known(self._link.term)]
        for waiting in self.waiting:
            if waiting.place.done():
                continue
            alone = self.needs_process_alone(waiting)
            fitting = [process for process in known if process.settings_hash == waiting.settings_hash]
            process = placement.choose(fitting, waiting.key, self.rules, alone=alone)
            if process is not None:
                # Counted at once: the next start in this loop must see the place as taken.
                process.reserved.add(waiting.worker_id)
                process.alone = waiting.key if alone else None
                waiting.place.set_result(process)

    def needs_process_alone(self, waiting: WaitingStart) -> bool:
        """Whether a start gets a process of its own at present."""
        return waiting.alone and placement.may_be_alone(self.processes.values(), waiting.key, self.rules)

    async def _assign(self, process: Process, spec: WorkerSpec) -> Instance | None:
        """Assign the worker to a process; None if the process accepts no more workers."""
        # The start may have waited long for its place. A leader that gets the token after this call has the process in
        # its listing and queries it (lifecycle: pooled-late-process); a deposed leader fails here.
        await self.link.confirm(since=process.seen_at)
        if process.is_gone:
            return None
        worker_id, now, term = spec.worker_id, self._clock.time(), self.link.term
        # Record it before sending: once the message is sent, the worker may run even if this call fails. If the leader
        # dies here, the next leader finds the worker in the report of the process, or the worker never started.
        spec_hash = spec.spec_hash or self.spec_hash()
        process.starting[worker_id] = Starting(spec.key, spec.slot, spec_hash, now, term)
        assign = Assign(_new_question(), spec.environment, spec.slot, spec_hash, now)
        self._log.debug("worker is assigned", process=process.worker_id, key=spec.key, worker_id=worker_id)
        # Repeated with the same id until it is answered; a worker id starts once (lifecycle: pooled-ids-once).
        await self._ask(process, assign)
        process.starting.pop(worker_id, None)
        # Answered: from here on only reports show whether the worker exists (lifecycle: pooled-taken-until-answered).
        if (worker := process.worker(worker_id)) is not None:
            return worker
        refusal = process.refusal(worker_id)
        if refusal is not None and refusal.taken_by is not None:
            raise SlotTakenError("A worker of this slot exists already.", key=spec.key, slot=spec.slot)
        self._log.info("process refused a worker", process=process.worker_id, key=spec.key, worker_id=worker_id)
        return None

    async def _until_ended(self, process: Process, release: Release) -> None:
        """Repeat `release` until the process reports that the worker has ended."""
        limit = release.grace + self.rules.process_timeout
        since = self._clock.monotonic()
        while True:
            # The same question each time, with the same id: a process that has executed it only answers again.
            await self._ask(process, release)
            # The process has answered and does not list the worker: it now refuses an `assign` that is still in
            # transit.
            if process.assignment(release.worker_id) is None:
                process.starting.pop(release.worker_id, None)
            if not process.runs(release.worker_id):
                return
            if self._clock.monotonic() - since > limit:
                raise DriverUnavailableError("The process answers but does not end the worker.")
            await self._next_report(process)

    def _log_worker(self, event: str, process: Process, worker_id: WorkerId) -> None:
        worker = process.worker(worker_id)
        key = None if worker is None else worker.key
        self._log.debug(event, process=process.worker_id, key=key, worker_id=worker_id)

    async def _next_report(self, process: Process) -> None:
        """Wait for a report of the process, at most until the question must be repeated."""
        watcher = Wakeup(self._clock)
        process.watchers.add(watcher)
        try:
            await watcher.wait(self.rules.repeat_after)
        finally:
            process.watchers.discard(watcher)

    # --- questions

    async def _require_reports(self) -> None:
        """Wait until every process has reported its workers in this term. Kill a process that does not answer."""
        term = self.link.term
        unknown = [process for process in self.processes.values() if not process.is_known(term)]
        # Queried concurrently: several silent processes cost one time-out. With `return_exceptions` all queries end
        # before an error is raised, so that none continues after the end of the term.
        ends = await asyncio.gather(*(self._require_report(process) for process in unknown), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        # An incomplete listing is an error and never a shorter list (lifecycle: pooled-ask-first).
        if any(not process.is_known(term) for process in self.processes.values()):
            raise DriverUnavailableError("Not all pooled processes have reported their workers yet.")

    async def _require_report(self, process: Process) -> None:
        try:
            await self.ask_state(process)
        except ProcessSilentError:
            if not process.is_known(self.link.term):  # its start may have returned in the meantime
                await self._kill_unknown(process)
        except ProcessGoneError:
            pass

    async def _kill_unknown(self, process: Process) -> None:
        """Kill a process whose workers are unknown. If that fails, they stay unknown."""
        try:
            await self.kill(process, "it did not answer the new leader")
        except DriverError as error:
            self._log.warning("process not killed", process=process.worker_id, error=str(error))

    async def _ask(self, process: Process, question: Question, *, limit: float | None = None) -> None:
        """Send a question, and repeat it until the process has answered.

        Raises `ProcessSilentError` if it does not answer within `limit` seconds (default: `process_timeout`). Only the
        time after sends that RabbitMQ has accepted counts: while RabbitMQ blocks publishers, a process cannot answer.
        Raises `ProcessGoneError` if the process has ended.
        """
        link, name, silent = self.link, question.question, 0.0
        limit = self.rules.process_timeout if limit is None else limit
        repeat = self.rules.repeat_after
        # Registered before the message is sent: the answer may be here before `send` returns.
        answer = process.questions[name] = Wakeup(self._clock)
        try:
            while True:
                self._require_running(process)
                # Crash after it: the next leader queries all processes, which then ignore messages of this term.
                accepted = await link.send(process.worker_id, question)
                await answer.wait(repeat)
                if name in process.answered:
                    return
                # The question belongs to a term that is over: its answer proves nothing to the next one.
                if self._link is not link:
                    raise DriverUnavailableError("The term ended before the process answered.")
                self._require_running(process)
                # Only time in which the process had the question counts against it.
                silent += repeat if accepted else 0.0
                if silent >= limit:
                    raise ProcessSilentError(f"The pooled process {process.worker_id} does not answer.")
        finally:
            process.questions.pop(name, None)
            process.answered.discard(name)

    def _require_running(self, process: Process) -> None:
        if process.is_gone or self.processes.get(process.worker_id) is not process:
            raise ProcessGoneError(f"The pooled process {process.worker_id} has ended.")

    async def _find(self, worker_id: WorkerId) -> Process | None:
        """The process with this id; None if it does not exist. Lists first if it or its workers are unknown."""
        process = self.processes.get(worker_id)
        if process is None or not process.is_known(self.link.term):
            await self.refresh()
            await self._require_reports()
        return self.processes.get(worker_id)

    async def _watch_inner(self) -> None:
        async for _ in self.inner.events():
            with suppress(DriverError):
                await self.refresh()
            self.changed()


def worker_hash(process_hash: str) -> str:
    """The hash of pooled workers whose processes have this hash."""
    return hash_options({"placement": "pooled", "process": process_hash})


def _idle_workers(processes: Iterable[Process]) -> list[Assignment]:
    """The workers without requests, the least recently used first."""
    workers = ((process, worker) for process in processes for worker in process.assignments())
    idle = [one for process, one in workers if process.runs(one.worker_id) and not one.in_flight]
    return sorted(idle, key=lambda one: one.last_used)


def running(processes: Iterable[Process]) -> list[Process]:
    """The processes that have not exited."""
    return [process for process in processes if process.instance.state is not InstanceState.EXITED]


def _new_question() -> str:
    return uuid.uuid4().hex

"""The pooled driver: starts the workers of many keys inside a few processes of another driver.

For the pool it is an ordinary driver: a worker assigned to a process is an instance like any other. A *process* is an
instance of the inner driver with the key `PROCESS_KEY`. The driver decides nothing about groups; it chooses the process
for a worker. Only the processes know which workers exist: at the start of a term the driver queries every process, and
places no worker until each process has answered or was killed. Source: docs/explanation/placement.md.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from osrdyne.aio.signals import Wakeup, WatchCell
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
from osrdyne.drivers.pooled.blame import ProcessDeaths
from osrdyne.drivers.pooled.link import ProcessLink
from osrdyne.drivers.pooled.placement import PooledRules
from osrdyne.drivers.pooled.process import Process, Starting, split_id
from osrdyne.errors import (
    DriverError,
    DriverUnavailableError,
    SlotTakenError,
    StartFailedError,
)
from osrdyne.logs import Logger, get_logger
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
class Waiting:
    """A start that waits for a place. The result of `place` is a process; its exception is the reason why there is
    none."""

    worker_id: WorkerId
    key: Key
    alone: bool
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
        self.waiting: list[Waiting] = []
        self.deaths = ProcessDeaths(inner.context.clock)
        self.begun: dict[WorkerId, int] = {}
        """For each unfinished start of a process: the term that began it."""
        self.failed_starts = 0
        """The number of consecutive processes that ended before they were ready."""
        self.wakeup = Wakeup(inner.context.clock)
        """Set whenever processes may have to be started or ended."""
        self._clock = inner.context.clock
        self._link: ProcessLink | None = None
        self._listed_in: int | None = None
        self._early: dict[WorkerId, ProcessState] = {}
        self._dedicated: list[Instance] = []
        self._refreshing = asyncio.Lock()
        self._places: set[tuple[Key, int]] = set()
        self._changes = WatchCell(0)
        self._log: Logger = get_logger("pooled_driver", pool=inner.context.pool)

    # --- the term

    def begin_term(self, link: ProcessLink) -> None:
        """Use the link of a new term. Earlier reports of a process count only once it has answered this term."""
        # Nothing is listed in this term yet: the first start or listing asks all processes (lifecycle:
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
            # The report may come before the start has returned. Reports of strangers must not fill the memory.
            if len(self._early) < MAX_EARLY:
                self._early[worker_id] = state
            return
        if process.is_gone:
            # Its last word is what the inner driver says: a late report must not bring its workers back.
            return
        term = 0 if self._link is None else self._link.term
        if state.ready:
            self.failed_starts = 0
        before = process.workers()
        # An older report changes nothing, but may answer a question (lifecycle: pooled-sequence).
        if process.apply(state, term=term, now=self._clock.monotonic()):
            self.changed(relist=process.workers() != before)

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
        self._serve_waiting()
        self.wakeup.set()
        if relist:
            self._changes.set(self._changes.value + 1)

    # --- the interface of drivers

    def spec_hash(self) -> str:
        # Dedicated workers of the same settings have another hash, so that a change of the placement replaces them.
        return hash_options({"placement": "pooled", "process": self.inner.spec_hash()})

    async def list_instances(self) -> list[Instance]:
        await self.refresh()
        await self._know_all()
        workers = [worker for process in self.processes.values() for worker in process.workers()]
        return [*self._dedicated, *workers]

    async def start(self, spec: WorkerSpec) -> Instance:
        began = self._clock.monotonic()
        # A process of the earlier leader may hold this very key: it must be known before another one is chosen.
        if self._listed_in != self.link.term:
            await self.refresh()
        await self._know_all()
        # All processes have answered by now, so that no other one can hold this slot without being listed.
        self._require_free(spec)
        place = (spec.key, spec.slot)
        # No await since the check: two starts of one slot cannot both pass it.
        self._places.add(place)
        try:
            instance = await self._start_somewhere(spec)
        finally:
            self._places.discard(place)
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
        # Only of an exited worker: its end is recorded by now (lifecycle: pooled-forget-after-exit).
        forget = Forget(_new_question(), worker_id)
        self._log_worker("worker is forgotten", process, worker_id)
        while not process.is_gone and process.assignment(worker_id) is not None:
            with suppress(ProcessGoneError):
                await self._ask(process, forget)
        # Also for a process that is gone and cannot forget: its last report would list the worker again.
        process.removed.add(worker_id)
        process.starting.pop(worker_id, None)
        self.changed()

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        """The last lines of the worker if its process reports them, otherwise those of the process."""
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
        return await self.inner.logs(process.instance.instance_id, lines=lines)

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
            sorted(
                (worker for worker in process.assignments() if process.runs(worker.worker_id) and not worker.in_flight),
                key=lambda worker: worker.last_used,
            )
            for process in running(self.processes.values())
            if process.load > 1 and process.heap_share >= self.rules.max_heap_used
        ]

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
        # Read before the listing: one that a new term overtakes must not count as that term's.
        term = None if self._link is None else self._link.term
        # Only what was known before the listing can be missing in it.
        before = set(self.processes)
        listing = await self.inner.list_instances()
        present = self.inner.spec_hash()
        self._dedicated = [instance for instance in listing if instance.key != PROCESS_KEY]
        listed = {instance.worker_id: instance for instance in listing if instance.key == PROCESS_KEY}
        for worker_id, instance in listed.items():
            if (process := self.processes.get(worker_id)) is None:
                self.add(instance).is_outdated = instance.spec_hash != present
            else:
                await self._take_instance(process, instance)
        # The listing lacks processes that were started while it was made.
        for worker_id in before - listed.keys():
            if (vanished := self.processes.pop(worker_id, None)) is not None:
                # Those that wait for an answer end: the process will give none.
                vanished.wake()
        self._listed_in = term

    def add(self, instance: Instance) -> Process:
        """Add a process that was started or found, unless it is already known."""
        process = self.processes.get(instance.worker_id)
        if process is None:
            now = self._clock.monotonic()
            # A process of this term holds only what this term assigns to it (lifecycle: pooled-starts-with-term).
            started_in = self.begun.pop(instance.worker_id, None)
            process = Process(instance, seen_at=now, heard_at=now, started_in=started_in)
            self.processes[instance.worker_id] = process
            if (state := self._early.pop(instance.worker_id, None)) is not None:
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
        running = {worker.key for worker in process.assignments() if worker.in_flight > 0}
        if not process.closing:
            # Keys that were at work at several such deaths get a process of their own: one of them may be the cause.
            self.deaths.note(running)
        # A worker with an unanswered assignment may have run: list it as exited with the process, too.
        with suppress(DriverError):
            process.log_lines = await self.inner.logs(process.instance.instance_id, lines=LOG_LINES)
        ready = process.state is not None and process.state.ready
        log = self._log.info if process.closing else self._log.warning
        log(
            "process ended",
            process=process.worker_id,
            exit=str(process.instance.exit or "unknown"),
            workers=len(process.assignments()),
        )
        process.wake()
        # It came up once, so that its end says nothing against the next start.
        if ready or process.closing:
            return
        self.failed_starts += 1
        if self.failed_starts >= self.rules.start_attempts:
            reason = f"A pooled process ended before it was ready: {process.instance.exit or 'unknown exit'}."
            self.fail_waiting(StartFailedError(reason, log_lines=process.log_lines))

    def fail_waiting(self, error: DriverError) -> None:
        """End all starts that wait for a place, because none will become free."""
        for waiting in self.waiting:
            if not waiting.place.done():
                waiting.place.set_exception(error)

    async def kill(self, process: Process, why: str) -> None:
        """Kill a process that does not work. When this returns, its workers are listed as exited."""
        await self.link.confirm()
        if not process.is_gone:
            self._log.warning("process killed", process=process.worker_id, why=why, workers=process.load)
        # Its workers count as exited only when the inner driver says that it is gone (lifecycle:
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
        taken = {(worker.key, worker.slot) for worker in [*workers, *self._dedicated]} | self._places
        if (spec.key, spec.slot) in taken:
            raise SlotTakenError("A worker of this slot exists already.", key=spec.key, slot=spec.slot)

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
        """Wait for a process with room, and reserve a place in it. Raises `StartFailedError` if there is none in
        time."""
        waiting = Waiting(spec.worker_id, spec.key, self.deaths.is_alone(spec.key))
        self.waiting.append(waiting)
        timer = self._clock.call_later(self.rules.start_timeout, lambda: self._give_up(waiting))
        try:
            self._serve_waiting()
            self.wakeup.set()
            return await waiting.place
        except BaseException:
            # Cancelled after a place was found: it must not stay reserved for a worker that never comes.
            if waiting.place.done() and not waiting.place.cancelled() and waiting.place.exception() is None:
                waiting.place.result().reserved.discard(spec.worker_id)
            raise
        finally:
            timer.cancel()
            self.waiting.remove(waiting)

    def _give_up(self, waiting: Waiting) -> None:
        if not waiting.place.done():
            rules = self.rules
            waiting.place.set_exception(
                StartFailedError(
                    f"No pooled process had room for the worker within {rules.start_timeout:g} s: there may be "
                    f"{rules.max_processes} with {rules.keys_per_process} keys each. Raise worker.pooled.max_processes "
                    "or worker.pooled.keys_per_process, or give the processes more memory."
                )
            )

    def _serve_waiting(self) -> None:
        """Give places to the waiting starts, in their order."""
        if self._link is None:
            return
        # One that has not answered may be full of workers that an earlier leader has assigned.
        known = [process for process in self.processes.values() if process.is_known(self._link.term)]
        for waiting in self.waiting:
            if waiting.place.done():
                continue
            process = placement.choose(known, waiting.key, self.rules, alone=waiting.alone)
            if process is not None:
                # Counted at once: the next start in this loop must see the place as taken.
                process.reserved.add(waiting.worker_id)
                process.alone = waiting.key if waiting.alone else None
                waiting.place.set_result(process)

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
        process.starting[worker_id] = Starting(spec.key, spec.slot, self.spec_hash(), now, term)
        assign = Assign(_new_question(), spec.environment, spec.slot, self.spec_hash(), now)
        self._log.debug("worker is assigned", process=process.worker_id, key=spec.key, worker_id=worker_id)
        # Repeated with the same id until it is answered; a worker id starts once (lifecycle: pooled-ids-once).
        await self._ask(process, assign)
        process.starting.pop(worker_id, None)
        # Answered: from here on the report alone says whether the worker is there (lifecycle:
        # pooled-taken-until-answered).
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
            # The same question each time, with the same id: a process that knows it already only answers again.
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

    async def _know_all(self) -> None:
        """Wait until every process has reported its workers. Kill a process that does not answer."""
        term = self.link.term
        unknown = [process for process in self.processes.values() if not process.is_known(term)]
        # Wait for all of them: none may continue after the end of the term.
        # Asked all at once: one that is silent costs its time-out only once, and is killed then.
        ends = await asyncio.gather(*(self._know(process) for process in unknown), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        # An incomplete listing is an error and never a shorter list (lifecycle: pooled-ask-first).
        if any(not process.is_known(term) for process in self.processes.values()):
            raise DriverUnavailableError("Not all pooled processes have reported their workers yet.")

    async def _know(self, process: Process) -> None:
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
                # Crash after it: the next leader asks all processes, and messages of this term are ignored from then
                # on.
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
        """The process with this id. If the process or its workers are unknown, list again first."""
        process = self.processes.get(worker_id)
        if process is None or not process.is_known(self.link.term):
            await self.refresh()
            await self._know_all()
        return self.processes.get(worker_id)

    async def _watch_inner(self) -> None:
        async for _ in self.inner.events():
            with suppress(DriverError):
                await self.refresh()
            self.changed()


def running(processes: Iterable[Process]) -> list[Process]:
    """The processes that have not exited."""
    return [process for process in processes if process.instance.state is not InstanceState.EXITED]


def _new_question() -> str:
    return uuid.uuid4().hex

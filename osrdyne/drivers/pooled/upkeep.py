"""Maintains the processes of pooled workers during a term: starts, spares, ends, unresponsive processes, replacement.

It decides how many processes run; `PooledDriver` decides which process gets a worker.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from osrdyne.aio.clock import Backoff
from osrdyne.drivers.base import InstanceState
from osrdyne.drivers.pooled import placement
from osrdyne.drivers.pooled.driver import PooledDriver, ProcessGoneError, ProcessSilentError, running
from osrdyne.drivers.pooled.placement import PooledRules, ProcessSettings
from osrdyne.drivers.pooled.process import Process
from osrdyne.errors import BrokerError, DriverError, DriverUnavailableError, SlotTakenError, StartFailedError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import PROCESS_KEY, STATE_INTERVAL

Work: TypeAlias = Callable[[], Awaitable[None]]

INTERVAL = 1.0
"""Seconds between two checks of all processes, if nothing changes."""
QUIET_AFTER = 2 * STATE_INTERVAL
"""Seconds without a report after which a report is requested."""
LIST_INTERVAL = STATE_INTERVAL
"""Seconds between two listings while a process is not ready or does not report: the driver's event of its end may be
lost."""
SPARE_REST = 1.0
"""Seconds without a worker that starts after which a spare is started. Workers often start in groups, with short pauses
in between: after the end of a process, for example."""
SPARE_LIMIT = 30.0
"""Seconds for which a spare waits for starting workers at most."""
START_RETRY = Backoff(initial=1.0, maximum=60.0)
"""The pause after a process that ended before it was ready, or could not be started."""


class PooledUpkeep:
    """Runs for the length of one term."""

    def __init__(self, driver: PooledDriver) -> None:
        self._driver = driver
        self._rules = driver.rules
        self._clock = driver.context.clock
        self._busy: set[object] = set()
        self._failures: Counter[str] = Counter()
        """The number of consecutive starts that have failed, by the hash of the settings."""
        self._no_start_before: dict[str, float] = {}
        self._counted_ends: set[WorkerId] = set()
        """The processes whose end before they were ready has delayed the next start."""
        self._workers_start_at = -math.inf
        """When a worker was last found starting (monotonic)."""
        self._spare_due: dict[str, float] = {}
        """For each settings without all their spares: when one is started at the latest (monotonic)."""
        self._log: Logger = get_logger("pooled_upkeep", pool=driver.context.pool)

    async def run(self) -> None:
        """Maintain the processes. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._check_processes(group)
                await self._driver.wakeup.wait(INTERVAL)

    def _check_processes(self, group: asyncio.TaskGroup) -> None:
        """Start a task for each process that needs a call, and for a process that must be started."""
        now, term = self._clock.monotonic(), self._driver.link.term
        if self._driver.starts_workers:
            self._workers_start_at = now
        known = [one for one in self._driver.processes.values() if one.is_known(term)]
        for process in self._driver.processes.values():
            if not process.is_known(term):  # found during the term
                self._run_once(group, process, partial(self._query, process), name="query a process")
        for process in known:
            self._delay_start_after(process)
            if process.is_gone:
                if not process.workers():
                    # Not before the pool has recorded the ends of its workers: they are removed with the process.
                    self._run_once(group, process, partial(self._remove, process), name="remove a process")
                continue
            if process.retiring is None and not process.is_outdated:
                process.retiring = placement.retirement(process, self._rules, now=self._clock.time())
                if process.retiring:
                    self._log.info("process is replaced", process=process.worker_id, why=process.retiring)
                    self._driver.changed()
            if process.state is not None and now - process.heard_at >= QUIET_AFTER:
                self._run_once(group, process, partial(self._query, process), name="query a silent process")
            elif not process.is_ready and now - process.seen_at >= self._rules.start_timeout:
                why = "it was not ready within start_timeout"
                self._run_once(group, process, partial(self._driver.kill, process, why), name="kill a process")
        alive = running(self._driver.processes.values())
        missed = any(not process.is_ready or now - process.heard_at >= QUIET_AFTER for process in alive)
        if missed and now - self._driver.listed_at >= LIST_INTERVAL:
            self._run_once(group, "list", self._driver.refresh, name="list the processes")
        for process in self._processes_to_end(known, now):
            if process not in self._busy:  # otherwise it would stay marked as closing although no call ends it
                # Before the call: no worker is placed in it from this decision on (lifecycle: pooled-ends-empty).
                process.closing = True
                self._run_once(group, process, partial(self._end, process, decided_at=now), name="end a process")
        if "start" not in self._busy:
            wanted = next((one for one in self._driver.settings.values() if self._needs_process(one)), None)
            if wanted is not None:
                self._run_once(group, "start", partial(self._start, wanted), name="start a process")

    def _processes_to_end(self, known: list[Process], now: float) -> list[Process]:
        """The empty processes to end: those beyond the spares of their settings, and one that makes room for other
        settings."""
        ends = []
        waiting = {one.settings_hash for one in self._driver.waiting if not one.place.done()}
        memory_is_short = placement.is_shared_memory_short(known)
        for settings_hash in dict.fromkeys(process.settings_hash for process in known):
            group = [process for process in known if process.settings_hash == settings_hash]
            rules = self._rules_of(self._driver.settings.get(settings_hash))
            ends += placement.processes_to_end(
                group, rules, waiting=settings_hash in waiting, now=now, memory_is_short=memory_is_short
            )
        idle = placement.process_to_make_room(running(self._driver.processes.values()), waiting, self._rules)
        return ends if idle is None or idle in ends else [*ends, idle]

    def _rules_of(self, settings: ProcessSettings | None) -> PooledRules:
        return replace(self._rules, spares=0 if settings is None else settings.spares)

    def _needs_process(self, settings: ProcessSettings) -> bool:
        """Whether a process with these settings is to be started now."""
        if self._clock.monotonic() < self._no_start_before.get(settings.hash, -math.inf):
            return False
        waiting = [one for one in self._driver.waiting if not one.place.done()]
        own = [self._driver.needs_process_alone(one) for one in waiting if one.settings_hash == settings.hash]
        alive = running(self._driver.processes.values())
        others = [one for one in alive if one.settings_hash != settings.hash]
        needed = placement.processes_to_start(
            [one for one in alive if one.settings_hash == settings.hash],
            own,
            self._rules_of(settings),
            elsewhere=others,
            others_wait=len(own) < len(waiting),
        )
        return self._may_start_spare(settings.hash, is_needed=needed > 0) if not own else needed > 0

    def _may_start_spare(self, settings_hash: str, *, is_needed: bool) -> bool:
        """Whether to start a needed spare now. Its JVM would compete for the processors with starting workers, whose
        callers wait."""
        if not is_needed:
            self._spare_due.pop(settings_hash, None)
            return False
        now = self._clock.monotonic()
        due = self._spare_due.setdefault(settings_hash, now + SPARE_LIMIT)
        return now >= min(due, self._workers_start_at + SPARE_REST)

    def _delay_start_after(self, process: Process) -> None:
        """Delay the next start if the process ended before it was ready."""
        if process.is_gone and process.worker_id not in self._counted_ends:
            self._counted_ends.add(process.worker_id)
            if failures := self._driver.failed_starts[process.settings_hash]:
                self._delay_start(process.settings_hash, failures)

    def _note_failure(self, settings_hash: str) -> None:
        """Count a start that failed, and delay the next one."""
        self._failures[settings_hash] += 1
        self._delay_start(settings_hash, self._failures[settings_hash])

    def _delay_start(self, settings_hash: str, failures: int) -> None:
        """Start no process with these settings for a while. Other settings are not affected."""
        self._no_start_before[settings_hash] = self._clock.monotonic() + START_RETRY.delay(failures)

    def _run_once(self, group: asyncio.TaskGroup, subject: object, work: Work, *, name: str) -> None:
        """Run `work` in a task, unless a task for this subject runs: an end and a kill of one process would race."""
        if subject in self._busy:
            return
        self._busy.add(subject)
        group.create_task(self._run(subject, work, name), name=name)

    async def _run(self, subject: object, work: Work, name: str) -> None:
        try:
            await work()
        except DriverError as error:
            self._log.warning("process call failed", action=name, error=str(error))
            await self._clock.sleep(INTERVAL)
        finally:
            self._busy.discard(subject)
            self._driver.wakeup.set()

    async def _start(self, settings: ProcessSettings) -> None:
        driver = self._driver
        link = driver.link
        await driver.refresh()
        # A process of an earlier start may have appeared meanwhile; it counts for the limit.
        if settings.hash not in driver.settings or not self._needs_process(settings):
            return
        # Ended processes hold their slot, and with it their name, until they are removed.
        taken = {process.instance.slot for process in driver.processes.values()}
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        try:
            spec = await link.make_process(slot, settings)
        except BrokerError as error:
            self._note_failure(settings.hash)
            self._log.warning("process credentials unavailable", error=str(error))
            if not error.retryable:
                reason = "RabbitMQ refused the credentials of a process; see the daemon's log."
                driver.fail_waiting(StartFailedError(reason), settings.hash)
            return
        await link.confirm()  # creating the credentials may have taken long
        try:
            # If the leader dies after this, the next leader finds the process and queries it.
            driver.begun[spec.worker_id] = (link.term, settings.hash)
            instance = await driver.inner.start(spec)
        except SlotTakenError:
            driver.begun.pop(spec.worker_id, None)
            # No process with this id exists: nothing else would remove its user before the start time-out.
            link.release_process(spec.worker_id)
            await driver.refresh()
            return
        except DriverUnavailableError:
            # The process may have been started, so it keeps its user. Each attempt creates another user in RabbitMQ.
            self._note_failure(settings.hash)
            raise
        except StartFailedError as error:
            driver.begun.pop(spec.worker_id, None)
            link.release_process(spec.worker_id)
            self._note_failure(settings.hash)
            self._log.error("process start failed", error=str(error))
            driver.fail_waiting(error, settings.hash)
            return
        self._failures.pop(settings.hash, None)
        driver.add(instance)
        self._log.info("process started", process=instance.worker_id, instance=instance.external_id)
        driver.changed()

    async def _end(self, process: Process, *, decided_at: float) -> None:
        """End a process that had no workers at `decided_at` (monotonic)."""
        driver = self._driver
        # It is empty for this leader. A deposed leader must not end it: the next one may have placed a worker in it.
        # Only an answer of the token channel that is later than the decision shows that this has not happened.
        await driver.link.confirm(since=decided_at)
        self._log.info("process ends", process=process.worker_id)
        try:
            await driver.inner.stop(process.instance.instance_id, grace=self._rules.stop_grace)
            await driver.refresh()
        finally:
            process.closing = process.is_gone  # if it still runs, it may take workers, and be ended later

    async def _remove(self, process: Process) -> None:
        """Remove a process that has ended, after the pool has recorded the ends of its workers."""
        driver = self._driver
        await driver.inner.remove(process.instance.instance_id)
        # After the removal: if that fails, the process is listed and the removal is repeated.
        driver.processes.pop(process.worker_id, None)
        self._counted_ends.discard(process.worker_id)
        driver.link.release_process(process.worker_id)
        driver.changed()

    async def _query(self, process: Process) -> None:
        """Request a report, and kill the process if it does not answer."""
        try:
            await self._driver.ask_state(process)
        except ProcessSilentError:
            await self._driver.kill(process, "it did not answer")
        except ProcessGoneError:
            pass

    async def stop_all(self) -> None:
        """End all processes at once, with their workers. A process that does not end in time is killed."""
        driver = self._driver
        await driver.refresh()
        processes = [one for one in driver.processes.values() if one.instance.state is not InstanceState.EXITED]
        for process in processes:
            process.closing = True
        stops = (driver.inner.stop(one.instance.instance_id, grace=self._rules.stop_grace) for one in processes)
        ends = await asyncio.gather(*stops, return_exceptions=True)
        for process, end in zip(processes, ends, strict=True):
            if isinstance(end, DriverError):
                self._log.warning("process not stopped", process=process.worker_id, key=PROCESS_KEY, error=str(end))
            elif isinstance(end, BaseException):
                raise end
        await driver.refresh()

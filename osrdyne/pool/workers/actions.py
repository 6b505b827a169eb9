"""Worker actions: carry out the plan of the worker groups loop with the driver, and record the outcome.

Every driver call requires that the leader's lease holds (lifecycle: lease). A call in progress when the term ends may
still take effect; that does no harm, because names are unique and surplus workers are stopped (lifecycle:
stop-by-instance).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Protocol

from osrdyne.drivers.base import Driver, Instance, InstanceId, WorkerSpec
from osrdyne.errors import (
    BrokerError,
    DriverError,
    DriverUnavailableError,
    SlotTakenError,
    StartFailedError,
)
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext, TermState
from osrdyne.pool.ports import Lease, QueueCommands, WorkerCredentials
from osrdyne.pool.state.workers import restart_backoff
from osrdyne.pool.state.workers.crashes import PREVIOUS_LINES
from osrdyne.pool.state.workers.instances import Draining, InventoryEntry
from osrdyne.pool.state.workers.worker_reports import WorkerReportState
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.key_check import KeyCheck, load_key_test
from osrdyne.pool.workers.plan import OVERDUE, Drain, GroupAction, Remove, Start, Stop, Update
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath
from osrdyne.protocol.refusals import KeyRefusal

LOG_LINES = 20
DRAIN_INTERVAL = 10.0  # Seconds until a draining worker is asked again to end.


class SpecFactory(Protocol):
    """Makes the specification of a worker, with its credentials. Raises `BrokerError`."""

    async def __call__(
        self, key: Key, slot: int, generation: Generation, *, unconfirmed: WorkerSpec | None = None
    ) -> WorkerSpec:
        """`unconfirmed`: an earlier start of this slot that may have taken effect. Its worker id and credentials are
        used again if possible."""
        ...


class WorkerActions:
    """Starts, stops and removes single workers, and records the outcome in the restart back-off."""

    def __init__(
        self,
        context: TermContext,
        state: TermState,
        *,
        driver: Driver,
        make_spec: SpecFactory,
        credentials: WorkerCredentials,
        queue_commands: QueueCommands,
        control: WorkerControl,
        lease: Lease,
    ) -> None:
        self._tracker = state.tracker
        self._instances = state.instances
        self._worker_reports = state.worker_reports
        self._restarts = state.restarts
        self._crashes = state.crashes
        self._ended_workers = state.ended_workers
        self._poison_texts = state.poison_texts
        self._driver = driver
        self._make_spec = make_spec
        self._credentials = credentials
        self._queue_commands = queue_commands
        self._control = control
        self._lease = lease
        self._clock = context.clock
        self._metrics = context.metrics
        self._start_attempts = context.settings.lifecycle.start_attempts
        self._refused_key_time = context.settings.lifecycle.refused_key_time
        self._key_check = KeyCheck(load_key_test(context.settings.worker.key_exists))
        self._stop_grace = context.settings.worker.stop_grace
        # Longer than any request, so that a drain interrupts none.
        self._drain_timeout = context.settings.worker.processing_timeout + self._stop_grace
        self._latest_errors: dict[Key, str] = {}
        # Starts that may have taken effect although the driver did not answer, by key and slot.
        self._unconfirmed: dict[Key, dict[int, WorkerSpec]] = {}
        self._unsent_texts: dict[Key, None] = {}
        self._log: Logger = get_logger("worker_actions")

    async def carry_out(self, key: Key, action: GroupAction) -> bool:
        """Carry out one action. Returns False if the driver failed and an immediate retry would not help."""
        # Without it a leader that has lost its token unnoticed would start and stop workers of the next one.
        await self._lease.confirm()
        try:
            # Crash within it: the driver call takes effect or not. The next leader lists the instances and plans from
            # that (lifecycle: stop-by-instance).
            done = await self._do(key, action)
        except DriverError as error:
            done, name = False, type(action).__name__.lower()
            if self._is_new_error(key, str(error)):
                self._log.warning("driver call failed", key=key, action=name, error=str(error))
        if done:
            self._latest_errors.pop(key, None)
        return done

    async def _do(self, key: Key, action: GroupAction) -> bool:
        match action:
            case Start(slot):
                return await self._start(key, slot)
            case Stop(instance_id, why):
                await self._stop(key, instance_id, why)
            case Drain(instance_id, why):
                await self._drain(key, instance_id, why)
            case Update(instance_id):
                return await self._update(key, instance_id)
            case Remove(instance):
                await self._remove(instance.instance_id)
        return True

    def _is_new_error(self, key: Key, error: str) -> bool:
        """Whether the latest error of the key was another one: a call that is retried every few seconds is logged
        once."""
        before, self._latest_errors[key] = self._latest_errors.get(key), error
        return before != error

    def forget_group(self, key: Key) -> None:
        """Forget a group that has ended: its next error is logged again, and its next start has a new worker id."""
        self._latest_errors.pop(key, None)
        # Their credentials stay until the start time-out: the driver may list such a worker later.
        self._unconfirmed.pop(key, None)

    async def _start(self, key: Key, slot: int) -> bool:
        unconfirmed = self._unconfirmed.get(key, {}).pop(slot, None)
        if unconfirmed is None and (refusal := await self._key_check.refusal(key)) is not None:
            self.note_refused_key(key, refusal)
            return True
        try:
            spec = await self._make_spec(key, slot, self._tracker.generation_of(key), unconfirmed=unconfirmed)
        except BrokerError as error:
            return self._note_missing_credentials(key, error)
        await self._lease.confirm()  # creating credentials may have taken a while (lifecycle: lease)
        try:
            # Crash after it: the next leader lists the worker; its name keeps a second one from being started
            # (lifecycle: unique-instance-names).
            instance = await self._driver.start(spec)
        except SlotTakenError as error:
            return await self._adopt_slot_owner(spec, error)
        except StartFailedError as error:
            self._credentials.release(spec.worker_id)
            self._note_refusal(key, error)
            return True
        except DriverUnavailableError:
            self._note_unconfirmed(spec)
            raise
        # At once, without a listing: the slot must count as taken when the key is planned again.
        self._instances.note(instance, now=self._clock.monotonic(), started_here=True, given=spec.spec_hash)
        self._metrics.worker_starts.labels(outcome="started").inc()
        self._log.info("worker started", key=key, worker_id=spec.worker_id, instance=instance.external_id)
        return True

    def _note_unconfirmed(self, spec: WorkerSpec) -> None:
        """Note a start that may have taken effect: the worker may use its credentials. The next attempt uses the same,
        because with its own each attempt would leave a user in RabbitMQ."""
        self._unconfirmed.setdefault(spec.key, {})[spec.slot] = spec

    async def _adopt_slot_owner(self, spec: WorkerSpec, error: SlotTakenError) -> bool:
        """The slot was taken concurrently, or by an earlier attempt: adopt that worker or report a name conflict."""
        key, slot = spec.key, spec.slot
        try:
            found = [instance for instance in await self._driver.list_instances() if instance.key == key]
        except DriverUnavailableError:
            self._note_unconfirmed(spec)
            raise
        if all(instance.worker_id != spec.worker_id for instance in found):
            # The user was created for a worker that does not exist: otherwise it would stay until the start time-out.
            self._credentials.release(spec.worker_id)
        for instance in found:
            self._instances.note(instance, now=self._clock.monotonic())
        if any(instance.slot == slot for instance in found):
            return True
        # Something that is not a worker has the name, and an operator has to remove it.
        if self._is_new_error(key, str(error)):
            self._log.error("worker name conflict", key=key, slot=slot, error=str(error))
        return False

    def _note_missing_credentials(self, key: Key, error: BrokerError) -> bool:
        """Retry if the HTTP API does not answer. If it refuses, an operator has to act, and requests are answered
        with the failure."""
        if error.retryable:
            if self._is_new_error(key, str(error)):
                self._log.warning("worker credentials unavailable", key=key, error=str(error))
            return False
        self._log.error("worker credentials refused", key=key, error=str(error))
        self._note_refusal(key, StartFailedError("RabbitMQ refused the worker's credentials; see the daemon's log."))
        return True

    def _note_refusal(self, key: Key, error: StartFailedError) -> None:
        self._metrics.worker_starts.labels(outcome="refused").inc()
        self._log.error("worker start failed", key=key, error=str(error))
        refused = partial(
            restart_backoff.start_refused,
            reason=str(error),
            log_lines=error.log_lines,
            attempts=1,
            now=self._clock.monotonic(),
        )
        self._restarts.apply(key, refused)

    def note_refused_key(self, key: Key, refusal: KeyRefusal, *, worker_id: str | None = None) -> None:
        """Record that the check, or the application of a worker, refuses the key: requests are answered with that."""
        self._metrics.worker_starts.labels(outcome="refused").inc()
        self._log.info("key refused", key=key, worker_id=worker_id, code=refusal.code, reason=refusal.message)
        refused = partial(
            restart_backoff.key_refused,
            refusal=refusal,
            refused_time=self._refused_key_time,
            now=self._clock.monotonic(),
        )
        self._restarts.apply(key, refused)

    async def _stop(self, key: Key, instance_id: InstanceId, why: str) -> None:
        entry = self._instances.get(instance_id)
        if entry is None:
            return
        # Its `ready` report may have been lost, and stopping a worker that serves costs its requests a delivery.
        if why == OVERDUE and await self._seems_to_serve(entry):
            self._worker_reports.assume_ready(entry.instance.worker_id, key)
            return
        await self._lease.confirm()  # asking RabbitMQ may have taken a while
        if entry.stopped_for != why:
            # Noted before the call: the end of this worker is no failed start.
            self._instances.mark_stopping(instance_id, why)
            self._log.info("worker stopping", key=key, worker_id=entry.instance.worker_id, why=why)
        # Crash while it runs: the stop may take effect later, which costs a redelivery at most (lifecycle:
        # stop-by-instance).
        await self._driver.stop(instance_id, grace=self._stop_grace)
        # The driver has returned: the worker is gone, and its queue may be bound again (lifecycle:
        # bind-waits-for-stop).
        self._instances.mark_exited(instance_id)

    async def _seems_to_serve(self, entry: InventoryEntry) -> bool:
        """Whether the queue has more consuming connections than the other workers account for.

        RabbitMQ may still count the consumer of a dead worker. Therefore a worker that is assumed to serve is checked
        again later: it does not, if requests wait and only workers that have reported to be ready consume.
        """
        key = entry.instance.key
        others = [
            other
            for other in self._instances.of_key(key)
            if other.instance.instance_id != entry.instance.instance_id and other.served
        ]
        if not self._worker_reports.is_assumed(entry.instance.worker_id):
            return await self._queue_commands.is_consumed(key, beside=len(others))
        reported = sum(not self._worker_reports.is_assumed(other.instance.worker_id) for other in others)
        return not await self._queue_commands.waits_for_consumer(key, beside=reported)

    async def _drain(self, key: Key, instance_id: InstanceId, why: str) -> None:
        """Ask a worker to finish its requests, however long that takes, and to end. No request is interrupted."""
        entry = self._instances.get(instance_id)
        if entry is None:
            return
        now = self._clock.monotonic()
        if entry.draining is None:
            self._log.info("worker draining", key=key, worker_id=entry.instance.worker_id, why=why)
            self._metrics.workers_drained.inc()
        until = entry.draining.until if entry.draining else now + self._drain_timeout
        draining = Draining(why, until=until, ask_again_at=now + DRAIN_INTERVAL)
        # Before the message: the worker may end at once, and its end must not count as a crash.
        self._instances.mark_draining(instance_id, draining)
        await self._control.drain(entry.instance.worker_id)  # A lost message is no failure: the worker is asked again.

    async def _update(self, key: Key, instance_id: InstanceId) -> bool:
        """Have the platform replace the workers of a group; they keep their credentials."""
        entry = self._instances.get(instance_id)
        if entry is None:
            return True
        try:
            spec = await self._make_spec(key, entry.instance.slot, self._tracker.generation_of(key))
        except BrokerError as error:
            if self._is_new_error(key, str(error)):
                self._log.warning("group settings not updated", key=key, error=str(error))
            return False
        self._credentials.release(spec.worker_id)
        await self._lease.confirm()
        updated = await self._driver.update(instance_id, spec)
        if updated is not None:
            self._instances.mark_updated(instance_id, updated, given=spec.spec_hash)
            self._log.info("group settings updated", key=key, worker_id=updated.worker_id)
        return True

    async def stop_all(self) -> None:
        """End every worker of the pool concurrently."""
        try:
            instances = await self._driver.list_instances()
        except DriverError as error:
            self._log.error("workers not stopped", error=str(error))
            return
        self._log.info("stopping workers", workers=len(instances))
        await asyncio.gather(*(self._end(instance) for instance in instances))

    async def _end(self, instance: Instance) -> None:
        try:
            await self._driver.stop(instance.instance_id, grace=self._stop_grace)
            await self._driver.remove(instance.instance_id)
        except DriverError as error:
            self._log.warning("worker not stopped", key=instance.key, instance=instance.external_id, error=str(error))
            return
        self._instances.drop(instance.instance_id)
        self._credentials.release(instance.worker_id)

    async def _remove(self, instance_id: InstanceId) -> None:
        entry = self._instances.get(instance_id)
        if entry is None:
            return
        # Before the removal, which deletes the logs.
        lines = await self._driver.logs(instance_id, lines=PREVIOUS_LINES)
        # Crash before: the next leader lists the worker as exited, and records its end then.
        await self._driver.remove(instance_id)
        # A listing may have changed the entry during the awaits above; the latest one says how the worker ended.
        entry = self._instances.drop(instance_id) or entry
        self.note_end(entry, log_lines=lines)
        await self.send_refused_texts(entry.instance.key)

    def note_end(self, entry: InventoryEntry, *, log_lines: tuple[str, ...]) -> None:
        """Record the end of a worker: nothing if it was intended, otherwise a failed start or a crash."""
        instance, why = entry.instance, entry.stopped_for
        # Only a clean exit counts as drained: a worker that crashed while it drained has crashed.
        if why is None and entry.draining is not None and (instance.exit is None or instance.exit.code == 0):
            why = entry.draining.why
        reported = self._worker_reports[instance.worker_id]  # read before it is forgotten: it is the evidence
        # Forgotten, because its last report may say that it serves.
        self._worker_reports.forget(instance.worker_id)
        self._credentials.release(instance.worker_id)
        end = WorkerDeath(
            worker_id=instance.worker_id,
            ended_with=entry.hangs or str(instance.exit or "an unknown exit code"),
            said=reported.reason if reported is not None else None,
            at=self._clock.time(),
            log_lines=log_lines,
        )
        self._ended_workers.note(instance.key, instance.slot, end)
        log_lines = log_lines[-LOG_LINES:]
        end = replace(end, log_lines=log_lines)
        if reported is not None and (why is None or entry.hangs is not None):
            self._note_evidence(entry, reported, end)
        if self._tracker.status(instance.key) is None or (why not in {None, OVERDUE} and not entry.hangs):
            return
        reason = why or f"the worker ended with {instance.exit or 'an unknown exit code'}"
        if reported is not None and reported.reason:
            reason = f"{reason}: {reported.reason}"
        self._metrics.worker_exits.inc()
        self._log.warning("worker ended", key=instance.key, worker_id=instance.worker_id, reason=reason)
        if why is None and not entry.served and not entry.started_here:
            return  # an earlier leader may have asked it to stop: its end says nothing about the next start
        now = self._clock.monotonic()
        ended = partial(
            restart_backoff.worker_ended,
            served=entry.served,
            lived=now - entry.seen_at,
            reason=reason,
            log_lines=log_lines,
            attempts_allowed=self._start_attempts,
            now=now,
            had_requests=reported is not None and bool(reported.requests or reported.suspects or reported.in_flight),
            had_completed=reported is not None and reported.completed > 0,
            with_others=instance.exit is not None and instance.exit.shared and instance.exit.of_process,
        )
        self._restarts.apply(instance.key, ended)

    def _note_evidence(self, entry: InventoryEntry, reported: WorkerReportState, end: WorkerDeath) -> None:
        """Record which requests ran in a worker that ended by itself or hung, and refuse the text that ended it."""
        instance = entry.instance
        if reported.requests:
            self._crashes.note(instance.key, end, reported.requests)
        home = instance.external_id if instance.exit is not None and instance.exit.of_process else instance.worker_id
        self._crashes.note_end(instance.key, home, ran=reported.requests, waiting=reported.waiting)
        if reported.blocked is not None:
            # Also in a process of several keys: the worker knows which handler it was.
            self._note_blocked(instance.key, reported.blocked)
        elif reported.alone is not None:
            # In a process of several keys a request of another key may be the cause: the driver moves suspects to other
            # processes.
            if instance.exit is None or not instance.exit.shared:
                self._refuse_text(instance.key, reported.alone)
        elif reported.stuck is not None:
            self._note_stuck(instance.key, reported.stuck)

    def _note_blocked(self, key: Key, text: str) -> None:
        if self._poison_texts.note_blocked(key, text):
            self._log.warning("request text refused", key=key, text=text)
            self._unsent_texts[key] = None

    def _refuse_text(self, key: Key, text: str) -> None:
        """Refuse a text after a request ended its second worker while nothing else ran in it.

        The next worker gets the text in its environment. A later leader does not have it: the request then runs again,
        and RabbitMQ's delivery limit still holds.
        """
        if self._poison_texts.note(key, text):
            self._log.warning("request text refused", key=key, text=text)
            self._unsent_texts[key] = None

    def _note_stuck(self, key: Key, text: str) -> None:
        """Record that a worker ended because the handler of this request did not end when it was cancelled.

        The caller has its answer, so the request does not come back as a suspect. Its text is refused once this has
        happened to a second worker. A later leader counts anew.
        """
        if self._poison_texts.note_stuck(key, text):
            self._refuse_text(key, text)

    async def send_refused_texts(self, key: Key) -> None:
        """Send the refused texts to the running workers of a key, if they have changed."""
        if key in self._unsent_texts and await self._control.send_refused_texts(key, self._poison_texts.of_key(key)):
            # Only once RabbitMQ has the message; otherwise it is sent with the next end of a worker.
            self._unsent_texts.pop(key, None)

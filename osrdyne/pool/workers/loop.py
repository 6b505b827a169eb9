"""The worker groups loop: the only component that starts, restarts and stops workers.

It lists instances, plans each group whose desired or observed state changed (`plan.plan_group`), and passes the actions
to `WorkerActions`, which carries them out concurrently. No action is retried within a pass: a failure is recorded
(back-off, start failure), and the next pass plans again. The loop is woken by changes of desired state, queue status,
worker reports and driver events; a slow resync covers missed events. It is the only writer of the worker status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import Subscription, Wakeup
from osrdyne.drivers.base import Driver, InstanceId, InstanceState
from osrdyne.errors import DriverError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext, TermState
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import CIRCUIT, ObservedWorkers
from osrdyne.pool.state.workers import restart_backoff
from osrdyne.pool.state.workers.instances import InventoryEntry
from osrdyne.pool.state.workers.restart_backoff import RestartBackoff
from osrdyne.pool.workers.actions import WorkerActions
from osrdyne.pool.workers.autoscaler import Autoscaler
from osrdyne.pool.workers.plan import (
    REFUSED,
    Drain,
    GroupAction,
    ObservedGroup,
    Remove,
    Start,
    Stop,
    Update,
    Wait,
    plan_group,
)
from osrdyne.protocol.names import Key, started_as

DRIVER_RETRY = Backoff(initial=1.0, maximum=30.0)
# How many groups are planned before other tasks get their turn; planning one takes 0.1 to 0.3 ms.
PLANNED_AT_ONCE = 100
DRIVER_PAUSE = 2.0  # Seconds that a group waits after a failed driver call.
LISTING_SHARE = 4.0
# After a listing that an event requested, the next one waits this many times as long as it took, with this maximum in
# seconds: a hundred starts at once do not cause a hundred listings.
LONGEST_REST = 5.0


class WorkerGroupsLoop:
    """Converges the workers of one term."""

    def __init__(
        self,
        context: TermContext,
        state: TermState,
        *,
        driver: Driver,
        actions: WorkerActions,
        autoscaler: Autoscaler,
    ) -> None:
        self._tracker = state.tracker
        self._admission = state.admission
        self._queue_status = state.queue_status
        self._worker_status = state.worker_status
        self._worker_reports = state.worker_reports
        self._start_durations = state.start_durations
        self._rank = state.backlog.rank
        self._instances = state.instances
        self._restarts = state.restarts
        self._driver = driver
        self._profiles = state.profiles
        self._actions = actions
        self._autoscaler = autoscaler
        self._policy_changes = state.created_queues.policy_changes
        self._paused = state.paused
        self._clock = context.clock
        self._metrics = context.metrics
        self._limits = context.settings.lifecycle
        self._dirty: dict[Key, None] = {}
        self._waiting_for_room: dict[Key, None] = {}
        self._recheck: dict[Key, float] = {}
        self._acting: dict[Key, list[GroupAction]] = {}
        self._starts_under_way = 0
        self._room = 0
        self._relist = False
        # Keys with actions since the latest listing began, and those of them whose listing was ignored.
        self._touched: set[Key] = set()
        self._unread: set[Key] = set()
        self._wakeup = Wakeup(context.clock)
        self._log: Logger = get_logger("worker_groups")

    # --- called by other components

    def reconcile(self, key: Key) -> None:
        """Plan this group again."""
        self._dirty[key] = None
        self._wakeup.set()

    def relist(self) -> None:
        """List the instances again."""
        self._relist = True
        self._wakeup.set()

    def retry(self, key: Key) -> None:
        """Retry after a final start failure, because a request arrived: only if its back-off is over."""
        failure = self._restarts[key].failure
        # An earlier request is answered with the failure: callers must not make the platform start workers in a loop.
        if failure is not None and self._clock.monotonic() >= failure.retry_at:
            self._restarts.apply(key, restart_backoff.retry_allowed)
            self.reconcile(key)

    def settings_changed(self, keys: Iterable[Key]) -> None:
        """Plan these groups again: their settings have changed. A start that has failed may be tried again at once."""
        for key in keys:
            if self._restarts[key].failure is not None:
                self._restarts.apply(key, restart_backoff.retry_allowed)
            self.reconcile(key)
        # If some keys are not pooled any more, the room of the processes does not limit the groups.
        for key in self._admission.promote():
            self.reconcile(key)

    def replace_hanging(self, key: Key, hanging: Mapping[str, str]) -> None:
        """Stop workers that are alive and do not work (by worker id, with the reason), and start others."""
        for entry in self._instances.of_key(key):
            if (why := hanging.get(entry.instance.worker_id)) is not None:
                self._instances.mark_hanging(entry.instance.instance_id, why)
        self.reconcile(key)

    def start_queue(self) -> list[Key]:
        """The keys that wait for a start under `max_concurrent_starts`, in the order in which they start."""
        return sorted(self._waiting_for_room, key=self._rank)

    async def list_instances(self) -> None:
        """List the driver's instances. At the start of a term this comes before anything is decided.

        The listing is ignored for groups with actions in progress, because it may be outdated for them.
        """
        # Before the listing is requested: an action that ends meanwhile makes the listing outdated for its key.
        self._touched = set(self._acting)
        # Complete, or an error: an instance that is missing in it counts as gone, and its queue may be deleted.
        listing = await self._driver.list_instances()
        changed, vanished = self._instances.apply_listing(listing, now=self._clock.monotonic(), ignoring=self._touched)
        for entry in vanished:
            # No longer listed: its logs are gone, too.
            self._actions.note_end(entry, log_lines=())
        for key in changed:
            # Before anything is bound: a stop by an earlier leader may be in progress (lifecycle: bind-waits-for-stop).
            self._publish(key)
            self.reconcile(key)
        # The ignored keys are listed again once their actions are over.
        self._unread |= self._touched & self._acting.keys()
        if self._touched - self._acting.keys():
            self.relist()

    # --- the loop

    async def run(self) -> None:
        """List, plan and act. Runs until the term ends."""
        sources = [
            self._tracker.subscribe(),
            self._queue_status.feed.subscribe(already=self._queue_status.keys()),
            self._worker_reports.feed.subscribe(),
            self._autoscaler.feed.subscribe(),
            self._policy_changes.subscribe(),
            self._paused.feed.subscribe(),
        ]
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(self._mark(source), name="group changes")
            group.create_task(self._watch_driver(), name="driver events")
            await self._converge(group)

    async def _mark(self, source: Subscription[Key]) -> None:
        while True:
            for key in await source.wait():
                self.reconcile(key)

    async def _watch_driver(self) -> None:
        """Request a listing for every driver event, and open the stream of events again when it ends."""
        failures = 0
        while True:
            try:
                # The content of an event is not used: a listing has it, and also that of lost events.
                async for _ in self._driver.events():
                    failures = 0
                    self.relist()
            except DriverError as error:
                self._log.warning("driver event stream lost", error=str(error))
            failures += 1
            # Also after a stream that ended without an error: a driver that ends it at once must not keep the loop
            # busy.
            await self._clock.sleep(DRIVER_RETRY.delay(failures))
            self.relist()

    async def _converge(self, group: asyncio.TaskGroup) -> None:
        failures = 0
        earliest = self._clock.monotonic()  # of the next listing, even on request
        next_listing = earliest + self._limits.resync_interval
        while True:
            began = self._clock.monotonic()
            # A listing of thousands of workers takes long: requested ones are spaced by a multiple of their duration.
            if began >= (earliest if self._relist else next_listing):
                self._relist = False
                try:
                    await self.list_instances()
                    failures, pause = 0, self._limits.resync_interval
                except DriverError as error:
                    failures += 1
                    pause = DRIVER_RETRY.delay(failures)
                    self._log.warning("driver listing failed", error=str(error), failures=failures)
                now = self._clock.monotonic()
                earliest = now + min(LONGEST_REST, LISTING_SHARE * (now - began))
                next_listing = now + pause
            self._plan_keys(group)
            if self._dirty:
                await asyncio.sleep(0)  # others first: a new leader may have thousands of groups to plan
                continue
            due = earliest if self._relist else next_listing
            await self._wakeup.wait(max(0.0, min([due, *self._recheck.values()]) - self._clock.monotonic()))
            now = self._clock.monotonic()
            for key in [key for key, at in self._recheck.items() if at <= now]:
                del self._recheck[key]
                self._dirty[key] = None

    def _plan_keys(self, group: asyncio.TaskGroup) -> None:
        """Plan the keys that wait for a start and the keys that changed, a part of the latter at a time.

        If there is room for starts, keys come by the priority of their requests, then in the order in which they became
        ready for a start: the queue of a later request may be declared first.
        """
        dirty = self._next_keys()
        # First for all keys: a worker that has become ready makes room for another start.
        for key in dirty:
            self._note_served(key)
            self._note_refused(key)
            self._note_mismarked(key)
        # Counted anew in each pass: workers become ready, or end, without an action of this loop.
        self._room = self._limits.max_concurrent_starts - self._starts_under_way - self._instances.loading()
        waiting, self._waiting_for_room = self._waiting_for_room, {}
        keys = [*waiting, *(key for key in dirty if key not in waiting)]
        # The first to be planned are started. Without room no key is, and the order need not be computed.
        for key in sorted(keys, key=self._rank) if self._room > 0 else keys:
            if key in dirty or self._room > 0:
                self._plan(key, group)
            else:
                self._waiting_for_room[key] = None
        # In the order in which they became ready for a start, whatever the order of planning: it decides among keys of
        # one priority.
        still = self._waiting_for_room
        self._waiting_for_room = dict.fromkeys([*(key for key in waiting if key in still), *still])

    def _next_keys(self) -> dict[Key, None]:
        """Take the keys to plan now out of those that changed: keys that a request waits for come first."""
        if len(self._dirty) <= PLANNED_AT_ONCE:
            keys = list(self._dirty)
        else:
            awaited = [key for key in self._dirty if self._queue_status.is_awaited(key)]
            others = (key for key in self._dirty if not self._queue_status.is_awaited(key))
            keys = [*awaited, *islice(others, max(0, PLANNED_AT_ONCE - len(awaited)))]
        for key in keys:
            del self._dirty[key]
        return dict.fromkeys(keys)

    # --- one group

    def _plan(self, key: Key, group: asyncio.TaskGroup) -> None:
        """Plan the group, and start the actions unless some are in progress already."""
        if key not in self._acting:
            desired = self._tracker.status(key)
            entries = self._instances.of_key(key)
            if desired is None:
                self._forget_failures(key)
                if not entries:
                    self._worker_reports.forget_group(key)
                    self._actions.forget_group(key)
            self._update_place(key, is_desired=desired is not None, up=bool(entries))
            observed = self._observe(key, entries)
            actions = plan_group(desired, observed, slots=self._autoscaler.desired(key), now=self._clock.monotonic())
            self._begin(key, actions, group)
        self._publish(key)

    def _update_place(self, key: Key, *, is_desired: bool, up: bool) -> None:
        """Take or free the group's place under `max_groups`; a group with instances has one, whatever the limit."""
        # A running worker takes memory also beyond the limit: counted, it keeps others from exceeding it further.
        if up or (is_desired and self._tracker.is_pinned(key)):
            self._admission.admit(key)
        elif is_desired:
            self._admission.expect(key)
        else:
            for promoted in self._admission.release(key):
                self.reconcile(promoted)

    def _begin(self, key: Key, actions: list[GroupAction], group: asyncio.TaskGroup) -> None:
        """Record the waits, and start the actions: stops before starts, so that a slot is free."""
        waits = [action for action in actions if isinstance(action, Wait)]
        ends: list[GroupAction] = [action for action in actions if isinstance(action, Stop | Drain | Update | Remove)]
        starts: list[GroupAction] = [action for action in actions if isinstance(action, Start)]
        # Never both: a start would find its slot taken until the stop has ended (lifecycle: start-when-slot-is-free).
        chosen = ends or starts
        for wait in waits:
            if wait.until is not None:
                self._recheck_at(key, wait.until)
            elif wait.for_room:
                self._waiting_for_room[key] = None
        if chosen:
            # From here to the end of the actions the key is not planned: one action of a group at a time.
            self._acting[key] = chosen
            self._touched.add(key)
            # A start counts until the inventory counts its worker as loading.
            under_way = len(starts) if chosen is starts else 0
            self._starts_under_way += under_way
            self._room -= under_way
            # In a task of its own: a driver call may take minutes, and other groups go on.
            group.create_task(self._act(key, chosen, starts=under_way), name=f"workers of {key!r}")

    async def _act(self, key: Key, actions: list[GroupAction], *, starts: int) -> None:
        """Carry out the actions one after the other. After a failure the group pauses."""
        for action in actions:
            if not await self._actions.carry_out(key, action):
                # The remaining actions are planned anew, from the state after the pause.
                await self._clock.sleep(DRIVER_PAUSE)
                break
        self._starts_under_way -= starts
        # From here on the key may be planned again.
        del self._acting[key]
        self.reconcile(key)
        if key in self._unread:
            self._unread.discard(key)
            self.relist()

    def _observe(self, key: Key, entries: list[InventoryEntry]) -> ObservedGroup:
        failure = self._restarts[key].failure
        running = any(entry.instance.state is InstanceState.RUNNING for entry in entries)
        if failure is not None and (running or self._tracker.is_pinned(key)):
            self.retry(key)  # No caller waits for an answer that would trigger the retry.
            self._recheck_at(key, failure.retry_at)
        record = self._restarts[key]
        present = self._profiles.of(key).spec_hash
        for entry in entries:
            if entry.draining is not None:
                self._recheck_at(key, min(entry.draining.ask_again_at, entry.draining.until))
        return ObservedGroup(
            instances=[entry.instance for entry in entries],
            queue_exists=self._queue_status[key].exists,
            overdue=self._overdue(key, entries),
            refused=_ids(entry for entry in entries if entry.stopped_for == REFUSED),
            hanging={entry.instance.instance_id: entry.hangs for entry in entries if entry.hangs},
            back_off_until=record.back_off_until,
            failure=record.failure,
            room=max(0, self._room),
            admitted=self._admission.is_admitted(key),
            is_ending=record == RestartBackoff() and self._is_ending(key),
            serving=_ids(entry for entry in entries if entry.served),
            busy=_ids(entry for entry in entries if self._is_busy(entry)),
            outdated=_ids(entry for entry in entries if entry.is_outdated(present)),
            draining={entry.instance.instance_id: entry.draining for entry in entries if entry.draining},
            drains=self._driver.instance_is_worker,
            readers=self._autoscaler.readers(key) if self._driver.instance_is_worker else None,
            paused=self._paused.is_paused(key),
            probing=self._paused.is_probing(key),
        )

    def _is_busy(self, entry: InventoryEntry) -> bool:
        reported = self._worker_reports[entry.instance.worker_id]
        return reported is not None and reported.in_flight > 0

    def _is_ending(self, key: Key) -> bool:
        """Whether the idle times of the group are over, so that only an empty queue remains to be proven."""
        expected = self._tracker.record(key)
        if expected is None or expected.status is not GroupStatus.UNBOUND:
            return False
        return expected.due_at <= self._clock.monotonic()

    def _overdue(self, key: Key, entries: list[InventoryEntry]) -> frozenset[InstanceId]:
        overdue = set()
        for entry in entries:
            since = self._unready_since(entry)
            # A draining worker may never have been ready, and ends anyway.
            if entry.instance.state is InstanceState.RUNNING and since is not None and entry.draining is None:
                limit = since + self._limits.start_timeout
                if limit <= self._clock.monotonic():
                    overdue.add(entry.instance.instance_id)
                else:
                    self._recheck_at(key, limit)
        return frozenset(overdue)

    def _unready_since(self, entry: InventoryEntry) -> float | None:
        """Since when the worker could have reported that it is ready; None if it has. A worker that is assumed to be
        ready is checked again after the same time."""
        reported = self._worker_reports[entry.instance.worker_id]
        if reported is not None and reported.is_assumed:
            return reported.heard_at
        return None if entry.served else entry.seen_at

    def _recheck_at(self, key: Key, at: float) -> None:
        self._recheck[key] = min(at, self._recheck.get(key, at))

    def _note_served(self, key: Key) -> None:
        """Record workers that have become ready; they clear failed starts before them."""
        for entry in self._instances.of_key(key):
            reported = self._worker_reports[entry.instance.worker_id]
            if reported is not None and reported.suspects:
                self._restarts.apply(key, restart_backoff.has_suspects)
            if not entry.served and reported is not None and reported.state.serves:
                self._instances.mark_served(entry.instance.instance_id)
                self._metrics.worker_starts.labels(outcome="ready").inc()
                took = max(0.0, self._clock.monotonic() - entry.seen_at)
                self._metrics.start_seconds.observe(took)
                if entry.started_here:
                    # This term saw only a part of the start of other workers.
                    self._start_durations.note(took)
                if not entry.is_outdated(self._profiles.of(key).spec_hash):
                    self._restarts.apply(key, restart_backoff.became_ready)

    def _note_refused(self, key: Key) -> None:
        """Record that the application of a worker refuses the key: requests are answered with its error from now on."""
        for worker_id, refusal in self._worker_reports.take_refusals(key).items():
            entries = [one for one in self._instances.of_key(key) if one.instance.worker_id == started_as(worker_id)]
            if any(entry.served for entry in entries):
                continue  # the platform runs several workers for the group, and others serve
            for entry in entries:
                # Marked before it ends: its end is no failed start.
                self._instances.mark_stopping(entry.instance.instance_id, REFUSED)
            self._actions.note_refused_key(key, refusal, worker_id=worker_id)

    def _forget_failures(self, key: Key) -> None:
        """The next request begins without earlier failures; but a refused key stays refused until its time is over."""
        failure = self._restarts[key].failure
        if failure is not None and failure.refusal is not None and self._clock.monotonic() < failure.retry_at:
            self._recheck_at(key, failure.retry_at)
        else:
            self._restarts.clear(key)

    def _note_mismarked(self, key: Key) -> None:
        """Report workers that the driver lists with other settings than it was given."""
        for entry in self._instances.of_key(key):
            if entry.given not in {None, entry.instance.spec_hash} and not entry.is_mismarked:
                self._instances.mark_mismarked(entry.instance.instance_id)
                self._metrics.mismarked_workers.inc()
                self._log.error(
                    "driver lists a worker with other settings than it was given",
                    key=key,
                    worker_id=entry.instance.worker_id,
                    driver=self._driver.name,
                )

    def _publish(self, key: Key) -> None:
        """Write the status of the group's workers."""
        acting: Iterable[GroupAction] = self._acting.get(key, ())
        instances = tuple(entry.instance for entry in self._instances.of_key(key))
        observed = ObservedWorkers(
            instances=instances,
            stopping=any(isinstance(action, Stop) for action in acting)
            or any(instance.state is InstanceState.STOPPING for instance in instances),
            starting=any(isinstance(action, Start) for action in acting),
            failure=self._restarts[key].failure if self._tracker.status(key) is not None else None,
            waiting_for=self._waiting_for(key),
        )
        if observed.is_empty and self._queue_status[key].exists:
            # Kept from the first moment without a worker: later updates must not make evidence since then outdated.
            known = self._worker_status[key].empty_since
            observed = replace(observed, empty_since=self._clock.monotonic() if known is None else known)
        self._worker_status.set(key, observed)

    def _waiting_for(self, key: Key) -> str | None:
        if self._paused.is_paused(key):
            return CIRCUIT
        if self._tracker.status(key) is not None and not self._admission.is_admitted(key):
            return "max_groups"
        return "max_concurrent_starts" if key in self._waiting_for_room else None


def _ids(entries: Iterable[InventoryEntry]) -> frozenset[InstanceId]:
    return frozenset(entry.instance.instance_id for entry in entries)

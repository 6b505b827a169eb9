"""The request queues loop: makes queues and bindings as the tracker desires, key by key.

Each key with something to do has one actor. It reads the latest desired and observed state, takes one step, and plans
again (lifecycle: one-actor-per-key), so that a failure or wait of one key delays no other. It never branches on what
woke it. At the start of a term many keys have to be bound again: these take turns in the background, a few at a time,
until a request waits for one of them; new keys do not wait for them.

The loop is the only writer of the queue status, and sends commands to RabbitMQ only through `QueueCommands`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import ChangeFeed, Subscription, Wakeup
from osrdyne.broker.queues.safe_delete import DeleteOutcome, QueueCheck
from osrdyne.errors import BrokerConflictError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import QueueCommands
from osrdyne.pool.queues.depths import QueueDepths
from osrdyne.pool.queues.plan import QueueStep, delete_evidence_after, plan_queue
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import Binding, QueueStatuses, WorkerStatuses
from osrdyne.protocol.names import Key

# Between attempts to delete a queue that is still in use or whose messages are not accounted for.
DELETE_RETRY = Backoff(initial=1.0, maximum=30.0)
EVIDENCE_INTERVAL = 15.0  # Seconds until the total of a queue that did not answer is requested again.
RECHECK_INTERVAL = 60.0  # Seconds that an actor waits for a change before it plans again anyway.
# Between attempts to use a queue that exists with other arguments, which only an operator can delete.
CONFLICT_RETRY = Backoff(initial=5.0, maximum=300.0)
# How many keys found at the start of a term are bound or unbound at once while no request waits for them. The token
# channel carries out commands one after the other: a command for a waiting request queues behind this many at most.
BACKGROUND = 16


class RequestQueuesLoop:
    """Converges the request queues of one term."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        queue_commands: QueueCommands,
        queue_status: QueueStatuses,
        worker_status: WorkerStatuses,
        depths: QueueDepths,
    ) -> None:
        self._tracker = tracker
        self._queue_commands = queue_commands
        self._queue_status = queue_status
        self._worker_status = worker_status
        self._depths = depths
        self._settle_delay = context.settings.lifecycle.settle_delay
        self._clock = context.clock
        self._metrics = context.metrics
        self._requested: ChangeFeed[Key] = ChangeFeed()  # keys to plan again on request of other components
        self.found_unbound: ChangeFeed[Key] = ChangeFeed()
        """Keys whose binding another client has removed, perhaps together with the queue."""
        self._actors: dict[Key, Wakeup] = {}
        # Keys that this term has found, those of them that wait for a turn, and those that have one. A new leader may
        # find thousands of keys: without turns their commands would delay those of waiting requests.
        self._found: set[Key] = set()
        self._background: dict[Key, None] = {}
        self._in_background: set[Key] = set()
        self._group: asyncio.TaskGroup
        self._log: Logger = get_logger("request_queues")

    async def run(self) -> None:
        """Wake the actor of every key whose desired or observed state has changed. Runs until cancelled."""
        sources = [
            self._tracker.subscribe(),
            # Including the seeded keys: their changes came before this subscription.
            self._worker_status.feed.subscribe(already=self._queue_status.keys()),
            self._depths.feed.subscribe(),
            self._requested.subscribe(),
        ]
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(
                self._start_awaited(self._queue_status.awaited.subscribe()), name="awaited request queues"
            )
            for source in sources:
                self._group.create_task(self._wake_on(source), name="request queue changes")

    async def _wake_on(self, changes: Subscription[Key]) -> None:
        while True:
            for key in await changes.wait():
                self._wake(key)

    def _wake(self, key: Key) -> None:
        woken = self._actors.get(key)
        if woken is not None:
            woken.set()  # its actor plans again; a second one would send commands out of order
        elif self._next_step(key) is not QueueStep.DONE:
            if key in self._found and not self._queue_status.is_awaited(key):
                # A dict as an ordered set: keys get their turns in the order in which they were found.
                self._background[key] = None
                self._start_background()
            else:
                self._start(key)

    def _start(self, key: Key) -> None:
        self._found.discard(key)
        # Noted before its task runs: a change that comes meanwhile wakes it and starts no second one.
        self._actors[key] = Wakeup(self._clock)
        # The only place that starts an actor (lifecycle: one-actor-per-key).
        self._group.create_task(self._act(key), name=f"queue of {key!r}")

    async def _start_awaited(self, awaited: Subscription[Key]) -> None:
        """Start the actors of keys for which a request waits, without waiting for their turn."""
        while True:
            for key in await awaited.wait():
                # A request waits: the key leaves the background, and does not count against its limit.
                self._background.pop(key, None)
                self._wake(key)

    def _end_turn(self, key: Key) -> None:
        """End a key's turn in the background; it ends with the first command."""
        if key in self._in_background:
            self._in_background.discard(key)
            self._start_background()

    def _start_background(self) -> None:
        """Start the next keys that wait for their turn."""
        while self._background and len(self._in_background) < BACKGROUND:
            key = next(iter(self._background))
            # Its turn has come. A key whose actor was started meanwhile needs none.
            del self._background[key]
            if key not in self._actors and self._next_step(key) is not QueueStep.DONE:
                self._in_background.add(key)
                self._start(key)

    def _next_step(self, key: Key) -> QueueStep:
        # Read together and without an await: a plan from two moments could bind and delete at the same time.
        desired, queue, workers = self._tracker.status(key), self._queue_status[key], self._worker_status[key]
        # A total is requested only for a queue that is to be deleted: each request costs a listing.
        after = delete_evidence_after(queue, workers, settle_delay=self._settle_delay) if desired is None else None
        return plan_queue(
            desired,
            queue,
            workers,
            now=self._clock.monotonic(),
            settle_delay=self._settle_delay,
            messages=None if after is None else self._depths.messages(key, after=after),
        )

    async def _act(self, key: Key) -> None:
        """Take steps until the state is as desired. Cancelled only when the term ends, never within a command."""
        woken = self._actors[key]
        failures = 0
        try:
            while (step := self._next_step(key)) is not QueueStep.DONE:
                try:
                    # One command at a time for each key, and the latest desired state between two (lifecycle:
                    # one-actor-per-key).
                    wait = await self._take_step(step, key, failures)
                except BrokerConflictError as error:
                    failures += 1
                    # Requests that wait for this key are answered with it, instead of waiting for their deadline.
                    self._queue_status.update(key, fault=error)
                    self._log.error("request queue unavailable", key=key, error=str(error))
                    wait = CONFLICT_RETRY.delay(failures)
                else:
                    # Waiting for other components is no failure; a queue that could not be deleted is.
                    failed = step in {QueueStep.DELETE, QueueStep.DISPOSE} and wait is not None
                    failures = failures + 1 if failed else 0
                self._end_turn(key)
                if wait is not None:
                    # A change ends the wait: it may have made another step possible, or this one unnecessary.
                    await woken.wait(wait)
            self._end_turn(key)  # if no step was left to take
            self._queue_status.update(key, fault=None)  # the next request tries again
        finally:
            del self._actors[key]

    async def _take_step(self, step: QueueStep, key: Key, failures: int) -> float | None:
        """Take one step. Returns None to plan again at once, otherwise the seconds to wait for a change."""
        match step:
            case QueueStep.DECLARE:
                # Crash after it: the queue is empty and unbound. The next leader lists it, then binds or deletes it.
                await self._queue_commands.declare(key)
                self._queue_status.update(key, exists=True, binding=Binding.UNKNOWN, unbound_at=None, fault=None)
                # If the group was ended meanwhile, nothing has checked this queue.
                self._tracker.adopt(key, GroupStatus.UNBOUND)
            case QueueStep.CHECK:
                await self._check(key)
                return None
            case QueueStep.BIND:
                # Crash after it: the next leader counts the binding as unknown and binds again, which changes nothing
                # (lifecycle: listed-bindings-are-unknown).
                await self._queue_commands.bind(key)
                now = self._clock.monotonic()
                # The bind also took unused levels from their exchanges; each is disposed of on evidence of its own.
                # After the confirm: forwards wait for this state, and never choose a queue by it (lifecycle:
                # bound-is-reported-late).
                self._queue_status.update(key, binding=Binding.BOUND, unbound_at=None, bound_at=now, disposable=())
            case QueueStep.UNBIND:
                # Withdrawn before it is sent (lifecycle: bound-is-reported-late).
                self._queue_status.update(key, binding=Binding.UNKNOWN, unbound_at=None, unverified=False)
                await self._queue_commands.unbind(key)
                # The settle time starts at the confirm of this term, never at an observation (lifecycle:
                # always-unbind).
                self._queue_status.update(key, binding=Binding.UNBOUND, unbound_at=self._clock.monotonic())
            case QueueStep.DELETE:
                # Crash within it: if the next leader lists the queue, it unbinds it and proves it empty anew.
                return await self._delete(key, failures)
            case QueueStep.DISPOSE:
                return await self._dispose(key, failures)
            case QueueStep.WAIT_FOR_SETTLE:
                return self._settle_delay
            case QueueStep.KEEP:
                self._keep(key, DeleteOutcome.NOT_EMPTY)
                return None
            case QueueStep.WAIT_FOR_TOTAL:
                return EVIDENCE_INTERVAL
            case QueueStep.WAIT_FOR_STOP | QueueStep.WAIT_FOR_WORKERS:
                return RECHECK_INTERVAL
        self._metrics.queue_commands.labels(command=step.value).inc()
        # A new key has one line at info, "worker started".
        level = self._log.debug if step in {QueueStep.DECLARE, QueueStep.BIND} else self._log.info
        level("request queue changed", key=key, step=step.value)
        return None

    async def _check(self, key: Key) -> None:
        """Ask RabbitMQ about a group whose queue or binding may be gone, and apply the answer."""
        asked_at = self._clock.monotonic()
        found = await self._queue_commands.check(key)
        if found is QueueCheck.MISSING:
            self._note_repair("request_queue", "request queue missing, declaring it again", key)
            self._queue_status.update(key, exists=False)
            return
        # Not repaired by a command of its own: the next plan binds it again, in the order of all other steps.
        if found is QueueCheck.UNBOUND:
            self._note_repair("request_binding", "request queue binding missing, binding again", key)
            self.found_unbound.notify(key)
        # Only bind-ok of this term proves a binding (lifecycle: listed-bindings-are-unknown), never the HTTP API.
        binding = self._queue_status[key].binding if found is QueueCheck.INTACT else Binding.UNKNOWN
        self._queue_status.update(key, binding=binding, unverified=False, checked_at=asked_at)

    def _note_repair(self, kind: str, event: str, key: Key) -> None:
        self._metrics.topology_repairs.labels(object=kind).inc()
        self._log.warning(event, key=key)

    async def _delete(self, key: Key, failures: int) -> float | None:
        outcome = await self._queue_commands.delete_if_proven_empty(key)
        if outcome is DeleteOutcome.DELETED:
            self._queue_status.update(key, exists=False)
            self._metrics.queue_commands.labels(command="delete").inc()
            self._log.info("request queue deleted", key=key)
            return None
        self._keep(key, outcome)
        # A group that is desired again has another next step; otherwise the consumer or the probe needs time.
        return None if self._tracker.status(key) is not None else DELETE_RETRY.delay(failures + 1)

    async def _dispose(self, key: Key, failures: int) -> float | None:
        """Delete the queue of an unused level while its group continues; workers may need some time to stop
        consuming it (lifecycle: several-queues-per-group)."""
        priority = self._queue_status[key].disposable[0]
        outcome = await self._queue_commands.delete_level(key, priority)
        # The level stays disposable: its workers may not have cancelled their consumers yet.
        if outcome in {DeleteOutcome.IN_USE, DeleteOutcome.NO_EVIDENCE}:
            return DELETE_RETRY.delay(failures + 1)
        self._queue_status.update(
            key, disposable=tuple(one for one in self._queue_status[key].disposable if one != priority)
        )
        if outcome is DeleteOutcome.DELETED:
            self._metrics.queue_commands.labels(command="delete").inc()
            self._log.info("unused priority queue deleted", key=key, priority=priority)
        return None

    def _keep(self, key: Key, outcome: DeleteOutcome) -> None:
        self._metrics.deletes_refused.inc()
        self._log.info("request queue kept", key=key, reason=outcome.value)
        if outcome is DeleteOutcome.NOT_EMPTY and self._tracker.status(key) is None:
            self._tracker.require_worker_group(key)  # requests are in it: serve them

    def verify(self, key: Key, *, since: float) -> None:
        """Ask RabbitMQ whether the queue and binding of a key still exist, because an observation at `since`
        (monotonic) shows that one may be gone. Does nothing if it was checked or bound after that.

        Until the answer the key counts as not bound, so that no request is forwarded to a missing binding.
        """
        observed = self._queue_status[key]
        # A check or bind that came later has seen more than this observation: a burst of returned requests asks once.
        if observed.is_bound and max(observed.bound_at or 0.0, observed.checked_at or 0.0) < since:
            self._queue_status.update(key, unverified=True)
            self.reconcile(key)

    def verify_all(self) -> None:
        """Check the queues and bindings of all groups."""
        now = self._clock.monotonic()
        for key in self._queue_status.existing():
            self.verify(key, since=now)

    def reconcile(self, key: Key) -> None:
        """Plan this key again."""
        self._requested.notify(key)

    def adopt(self, key: Key) -> None:
        """Take over a listed queue; whether it is bound is unknown (lifecycle: listed-bindings-are-unknown)."""
        # A listing that is older than the declaration of this term must not reset a state that commands have proven.
        if not self._queue_status[key].exists:
            self._found.add(key)
            self._queue_status.update(key, exists=True, binding=Binding.UNKNOWN, unbound_at=None)

    def note_missing(self, key: Key) -> None:
        """Note that the queue of this key was deleted by another client."""
        self._queue_status.update(key, exists=False)
        self.reconcile(key)

    def bind_again(self, keys: Iterable[Key]) -> None:
        """Bind the queues of these groups again, because the priority levels in use have changed.

        All of them count as unbound at once, so that no request is forwarded by the new levels over an old binding.
        """
        for key in keys:
            # In one pass without an await: no request may see some keys with the new levels and others with the old.
            self._queue_status.update(key, binding=Binding.UNKNOWN, unbound_at=None)
            self.reconcile(key)

    def dispose(self, key: Key, priority: int) -> None:
        """Delete the queue of a priority level that no route uses any more, once it is proven empty."""
        self._queue_status.update(key, disposable=(*self._queue_status[key].disposable, priority))
        self.reconcile(key)

    def busy_keys(self) -> set[Key]:
        """Keys with a command in progress or waiting; a slow listing says nothing about them (lifecycle: resync)."""
        return set(self._actors)

"""The lifetimes of the queues that clients create for keys: created, renewed, deleted, expired.

The records are a global parameter of RabbitMQ, written by the leader only, so that they outlive the daemon and a change
of leader. A record changes in RabbitMQ before it changes here. The end of a queue has these steps; each is repeated
until the next one is possible, whichever leader took the one before:

1. The record is stored as ending. From then on the ingress answers new requests of the key `gone`, its workers are
   drained, and a consumer (`processors.failures.removals`) takes what waits in its queues and answers it `gone`.
   Crash before: the queue lives, and expires again. After: the next leader reads the record and goes on.
2. The group is retired: unbound, settled, proven empty, its workers stopped, its queues deleted, as for any group
   (lifecycle: "Deleting a queue"). Crash within: the next leader lists the queue and retires the group again.
3. The record is removed, with the policy that it holds, when neither queue nor worker is left and no request of the key
   waits for another attempt. Crash before: the next leader finds nothing left, and removes the record.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import Wakeup
from osrdyne.errors import (
    BrokerError,
    ConfigurationError,
    LeadershipLostError,
    NoSuchQueueError,
    PoolConflictError,
)
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.policies.authorization import ELEMENT, demands_unverifiable, unverifiable_demand
from osrdyne.ingress.policies.lifetimes import Countdown, CreatedQueue, EndReason, instant_text, read_record
from osrdyne.ingress.policies.manifest import KeyPolicy
from osrdyne.ingress.policies.table import FoundPolicy, without_capacity
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Lease
from osrdyne.pool.state.groups.pins import Parameters
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.observed import QueueStatuses, WorkerStatuses
from osrdyne.pool.state.queues.created_queues import CreatedQueues, policy_of_record
from osrdyne.protocol.names import PRIORITIES, Key, QueueId

EXPIRATION = "ExpirationInstant"
MAX_QUEUES = 1000  # All records are one parameter, which is written whole.
POLL_INTERVAL = 1.0  # Seconds between two passes while a queue ends.
FOLLOW_INTERVAL = 30.0  # Seconds between two comparisons of the records with the stored ones.
RETRY = Backoff(initial=1.0, maximum=30.0)


class QueueLifetimes:
    """Creates, renews and removes queues in one term.

    `may_have_returned`: whether a request may still come back to this queue after a wait for another attempt. `unpin`
    removes a pin that an operator stored.
    """

    def __init__(
        self,
        context: TermContext,
        *,
        created: CreatedQueues,
        tracker: PoolStateTracker,
        queue_status: QueueStatuses,
        worker_status: WorkerStatuses,
        parameters: Parameters,
        lease: Lease,
        may_have_returned: Callable[[QueueId], bool] = lambda queue: False,
        unpin: Callable[[Key], Awaitable[None]] | None = None,
    ) -> None:
        self._clock = context.clock
        self._created = created
        self._tracker = tracker
        self._queue_status = queue_status
        self._worker_status = worker_status
        self._parameters = parameters
        self._lease = lease
        self._may_have_returned = may_have_returned
        self._unpin = unpin
        self.name = f"osrdyne-{context.names.pool}-queues"
        self._countdowns: dict[Key, Countdown] = {}
        self._changing = asyncio.Lock()
        self._wakeup = Wakeup(context.clock)
        self._followed_at = context.clock.monotonic()
        self._log: Logger = get_logger("queue_lifetimes", pool=context.names.pool)

    # --- the records

    async def load(self) -> None:
        """Read the records at the beginning of a term."""
        self._use(await self._kept())
        policies = {record.key: self._created.policy(record.key) for record in self._created.all()}
        bounds = self._created.bounds
        demanding = [
            key for key, found in policies.items() if found and unverifiable_demand(found.policy.authorization, bounds)
        ]
        if demanding:
            # Created while the configuration had keys. Nothing passes until it has some again.
            self._log.error("created queues demand tokens, but nothing can verify them", keys=demanding[:10])

    async def is_missing(self) -> bool:
        """Whether there are records and RabbitMQ has none."""
        return self._created.has_any and await self._parameters.get_global_parameter(self.name) is None

    async def store_again(self) -> None:
        """Store the same records again."""
        async with self._changing:
            await self._store(await self._kept())

    async def create(self, key: Key, proposal: KeyPolicy, *, author: str) -> CreatedQueue:
        """Create the queue of a key. Raises `PoolConflictError` if there is one or there are too many, and
        `InvalidDocumentError` if the expiration instant has passed."""
        async with self._changing:
            records = await self._kept()
            if (known := records.get(key)) is not None:
                raise PoolConflictError(_describe_conflict(known))
            if len(records) >= MAX_QUEUES:
                raise PoolConflictError(
                    f"The pool has {MAX_QUEUES} created queues, the most that are possible: delete one that is not "
                    "needed, or set the policies of several keys with `osrdyne policies apply`."
                )
            record = self._record(key, proposal, author)
            await self._store({**records, key: record})
        self._log.info("queue created", key=key, author=author, expires=instant_text(record.expires_at))
        return record

    async def renew(self, key: Key, proposal: KeyPolicy | None, *, author: str) -> CreatedQueue:
        """Replace the proposal and the expiration instant. None: the present proposal, and the default lifetime. The
        effective policy is a proposal, too.

        Raises `NoSuchQueueError`, `PoolConflictError` if the queue is being removed, and `InvalidDocumentError` if the
        expiration instant has passed.
        """
        async with self._changing:
            records = await self._kept()
            known = _find(records, key)
            if known.is_ending:
                raise PoolConflictError(_describe_conflict(known))
            if proposal is None:
                elements = {name: value for name, value in known.proposal.items() if name != EXPIRATION}
                record = self._fitted(replace(known, proposal=elements, author=author))
            else:
                returned = self._created.policy(key)
                record = replace(self._record(key, proposal, author, returned), created_at=known.created_at)
            await self._store({**records, key: record})
        self._log.info("queue renewed", key=key, author=author, expires=instant_text(record.expires_at))
        return record

    async def remove(self, key: Key, *, author: str) -> CreatedQueue:
        """Begin to remove the queue. Repeating it changes nothing. Raises `NoSuchQueueError`."""
        async with self._changing:
            records = await self._kept()
            record = _find(records, key).ending(EndReason.DELETED)
            if record != records[key]:
                await self._store({**records, key: record})
                self._log.info("queue is being removed", key=key, author=author, reason=EndReason.DELETED.value)
        return record

    # --- the loop

    async def run(self) -> None:
        """Remove the queues that expire, and finish removals. Runs until cancelled; raises `LeadershipLostError`."""
        failures = 0
        while True:
            try:
                await self._follow_if_due()
                await self.advance()
                failures, pause = 0, self._next_pass()
            except LeadershipLostError:
                raise
            except BrokerError as error:
                failures += 1
                pause = RETRY.delay(failures)
                self._log.warning("queue lifetimes not advanced", error=str(error))
            await self._wakeup.wait(pause)

    async def advance(self) -> None:
        """Take the steps that are due by now."""
        if any(self._is_over(record) for record in self._created.all()):
            await self._expire()
        ended = [record.key for record in self._created.all() if record.is_ending and await self._has_ended(record.key)]
        if ended:
            async with self._changing:
                records = await self._kept()
                # Crash before: the next leader finds neither queue nor worker, and removes the record.
                await self._store({key: record for key, record in records.items() if key not in ended})
            for key in ended:
                self._log.info("queue removed", key=key)

    async def _expire(self) -> None:
        async with self._changing:
            # Decided under the lock: a renewal may have come first.
            records = await self._kept()
            over = [record for record in records.values() if self._is_over(record)]
            if over:
                await self._store({**records, **{one.key: one.ending(EndReason.EXPIRED) for one in over}})
        for one in over:
            self._log.info("queue is being removed", key=one.key, reason=EndReason.EXPIRED.value)

    async def _has_ended(self, key: Key) -> bool:
        """Take the next step of a removal. True if no step is left."""
        if self._tracker.is_pinned(key):
            # A removal takes precedence over a pin, which only keeps a group from ending because it is idle.
            if self._unpin is not None:
                await self._unpin(key)
            self._tracker.unpin(key)
        if self._tracker.status(key) is not None:
            # Refused while a request is on its way to the queue, and tried again in the next pass. A group that has
            # become active again, because a message was found in its queue, is retired again.
            if not self._tracker.is_retired(key):
                self._tracker.retire(key)
            return False
        if self._queue_status[key].exists or not self._worker_status[key].is_empty:
            return False
        return not any(self._may_have_returned((key, level)) for level in (None, *PRIORITIES))

    def _is_over(self, record: CreatedQueue) -> bool:
        countdown = self._countdowns.get(record.key)
        if record.is_ending or countdown is None:
            return False
        return countdown.is_over(wall=self._clock.time(), monotonic=self._clock.monotonic())

    def _next_pass(self) -> float:
        """Seconds until the next pass."""
        records = self._created.all()
        if any(record.is_ending for record in records):
            return POLL_INTERVAL
        wall, monotonic = self._clock.time(), self._clock.monotonic()
        due = (self._countdowns[one.key].due_in(wall=wall, monotonic=monotonic) for one in records)
        # Not longer than the interval: the wall clock may jump.
        return max(0.0, min(FOLLOW_INTERVAL, min(due, default=math.inf)))

    async def _follow_if_due(self) -> None:
        """Use the stored records if they differ: an earlier leader may have stored some while it lost the token."""
        if self._clock.monotonic() < self._followed_at + FOLLOW_INTERVAL:
            return
        async with self._changing:
            self._use(await self._kept())
        self._followed_at = self._clock.monotonic()

    # --- storing

    def _record(self, key: Key, proposal: KeyPolicy, author: str, returned: FoundPolicy | None = None) -> CreatedQueue:
        """`returned`: the present policy of the queue, which a client may have read and sends again."""
        now = self._clock.time()
        proposal = without_capacity(
            proposal,
            bounds=self._created.bounds,
            now=datetime.fromtimestamp(now, UTC),
            returned=None if returned is None else returned.policy,
        )
        proposed = proposal.proposed.get("expiration_instant")
        if proposed is not None and proposed.timestamp() <= now:
            raise InvalidDocumentError([Problem("it has passed; name a moment in the future", path=EXPIRATION)])
        if (why := demands_unverifiable(proposal, self._created.bounds)) is not None:
            raise InvalidDocumentError([Problem(why, path=ELEMENT)])
        return self._fitted(
            CreatedQueue(key, proposal.document(), author, created_at=now, renewed_at=now, expires_at=now)
        )

    def _fitted(self, record: CreatedQueue) -> CreatedQueue:
        """The record with the expiration instant that its proposal results in now."""
        record = replace(record, renewed_at=self._clock.time())
        policy = policy_of_record(record, self._created.bounds).policy
        return replace(record, expires_at=policy.expiration_instant.timestamp())

    async def _kept(self) -> dict[Key, CreatedQueue]:
        value = await self._parameters.get_global_parameter(self.name)
        if value is None:
            # Another client has deleted the parameter: the records of this leader apply.
            return {record.key: record for record in self._created.all()}
        listed = value if isinstance(value, list) else []
        records = [record for one in listed if (record := self._read(one)) is not None]
        if len(records) < len(listed) or not isinstance(value, list):
            self._log.error("stored queues are invalid, ignoring them", parameter=self.name)
        return {record.key: record for record in records}

    def _read(self, value: object) -> CreatedQueue | None:
        record = read_record(value)
        if record is not None:
            try:
                policy_of_record(record, self._created.bounds)
            except ConfigurationError:
                return None  # written by another program, or by a version that knows other elements
        return record

    async def _store(self, records: Mapping[Key, CreatedQueue]) -> None:
        await self._lease.confirm()  # a deposed leader must not overwrite the records of its successor
        await self._parameters.put_global_parameter(self.name, [record.stored() for record in records.values()])
        # Used after they are stored. Crash in between: the next leader uses the stored records.
        self._use(records)

    def _use(self, records: Mapping[Key, CreatedQueue]) -> None:
        wall, monotonic = self._clock.time(), self._clock.monotonic()
        # A countdown is kept while its instant stays the same: it must not follow a wall clock that has jumped.
        self._countdowns = {
            key: known
            if (known := self._countdowns.get(key)) is not None and known.expires_at == record.expires_at
            else Countdown.begin(record.expires_at, wall=wall, monotonic=monotonic)
            for key, record in records.items()
        }
        self._created.replace(records.values())
        self._wakeup.set()


def _find(records: Mapping[Key, CreatedQueue], key: Key) -> CreatedQueue:
    """The record of a key. Raises `NoSuchQueueError`."""
    if key not in records:
        raise NoSuchQueueError("No queue was created for this key.")
    return records[key]


def _describe_conflict(record: CreatedQueue) -> str:
    """Why a queue cannot be created or renewed while this record exists, with the remedy."""
    if record.is_ending:
        return "The queue of this key is being removed. Try again when `osrdyne queues show` does not find it any more."
    return "A queue was created for this key already: renew it (PUT), or delete it first."

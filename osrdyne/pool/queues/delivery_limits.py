"""The delivery limits of single keys (MaxDequeueRetries), as RabbitMQ policies that replace that of the pool.

One policy applies to a queue. So a key whose limit differs from that of the pool has a policy of its own, equal to that
of the pool in everything else, for as long as its queue exists. `DeliveryLimits` converges on that after a change of a
queue or of the queue policies, and periodically on a listing. Until the policy of a key exists, the limit of the pool
applies; a limit matters only after several failed deliveries. A crash may leave a policy too many or too few, which the
next leader finds in its listing. RabbitMQ compares each policy with each queue, so the number of these policies is
bounded; further keys have the limit of the pool, and `status` shows how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import ChangeFeed, Subscription, Wakeup
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.topology.policies import PolicySpec, key_policy
from osrdyne.errors import BrokerError, LeadershipLostError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Lease
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.protocol.names import Key

MAX_POLICIES = 200
RELIST_INTERVAL = 300.0  # Seconds between two listings of the policies, in case another client has deleted one.
RETRY = Backoff(initial=1.0, maximum=60.0)


class DeliveryLimits:
    """The policies of single keys in one term. `limit_of`: the delivery limit of a key; None: that of the pool."""

    def __init__(
        self,
        context: TermContext,
        *,
        queue_status: QueueStatuses,
        limit_of: Callable[[Key], int | None],
        policy_changes: ChangeFeed[Key],
        management: ManagementClient,
        lease: Lease,
    ) -> None:
        self._names, self._clock = context.names, context.clock
        self._pool_limit = context.settings.requests.delivery_limit
        self._queue_status = queue_status
        self._limit_of = limit_of
        self._policy_changes = policy_changes
        self._management = management
        self._lease = lease
        self._pool_policy: PolicySpec | None = None
        self._applied: dict[str, PolicySpec] | None = None  # None: not listed yet
        self._listed_at = 0.0
        self._dirty: dict[Key, None] = {}
        self._converging = asyncio.Lock()  # two concurrent writes of one policy could arrive in the wrong order
        self._wakeup = Wakeup(context.clock)
        self.left_out: set[Key] = set()
        """Keys that have the limit of the pool because there are too many policies."""
        self._log: Logger = get_logger("delivery_limits", pool=context.names.pool)

    def of(self, key: Key) -> int:
        """The delivery limit of a key."""
        limit = None if key in self.left_out else self._limit_of(key)
        return self._pool_limit if limit is None else limit

    async def use(self, pool_policy: PolicySpec) -> None:
        """Derive the policies from this one of the pool. Returns when those that exist are changed.

        Raises `BrokerError`: then some are still derived from the former one, until `run` changes them.
        """
        self._pool_policy = pool_policy
        for key in self._queue_status.existing():
            self._dirty[key] = None
        if self._applied is not None:
            async with self._converging:
                await self._converge()

    async def run(self) -> None:
        """Converge. Runs until cancelled; raises `LeadershipLostError`."""
        async with asyncio.TaskGroup() as group:
            for source in (self._queue_status.feed, self._policy_changes):
                group.create_task(self._follow(source.subscribe()), name="queues with a delivery limit")
            failures = 0
            while True:
                try:
                    async with self._converging:
                        await self._list_if_due()
                        await self._converge()
                    failures, pause = 0, RELIST_INTERVAL
                except LeadershipLostError:
                    raise
                except BrokerError as error:
                    failures += 1
                    pause = RETRY.delay(failures)
                    self._log.warning("delivery limits of keys not applied", error=str(error))
                await self._wakeup.wait(pause)

    async def _follow(self, source: Subscription[Key]) -> None:
        while True:
            self._dirty |= dict.fromkeys(await source.wait())
            self._wakeup.set()

    async def _list_if_due(self) -> None:
        now = self._clock.monotonic()
        if self._applied is not None and now < self._listed_at + RELIST_INTERVAL:
            return
        prefix = self._names.key_policy_prefix
        listed = await self._management.list_policies()
        self._applied = {policy.name: policy for policy in listed if policy.name.startswith(prefix)}
        self._listed_at = now
        existing = self._queue_status.existing()
        known = {self._names.key_policy(key) for key in existing}
        # Policies of queues that are gone: an earlier leader was killed before it deleted them.
        for name in sorted(self._applied.keys() - known):
            await self._delete(name)
        self._dirty |= dict.fromkeys(existing)

    async def _converge(self) -> None:
        while self._dirty:
            key = next(iter(self._dirty))
            # Removed before the change is applied: a change of the key that comes meanwhile is applied next.
            del self._dirty[key]
            try:
                await self._apply(key)
            except BaseException:
                self._dirty[key] = None  # left to the next attempt
                raise

    async def _apply(self, key: Key) -> None:
        if self._applied is None or self._pool_policy is None:
            return
        name, desired = self._names.key_policy(key), self._desired(key, self._pool_policy)
        self.left_out.discard(key)
        if desired is None:
            if name in self._applied:
                await self._delete(name)
        elif name not in self._applied and len(self._applied) >= MAX_POLICIES:
            self.left_out.add(key)
            self._log.warning("too many keys with a delivery limit of their own", key=key, limit=MAX_POLICIES)
        elif self._applied.get(name) != desired:
            await self._lease.confirm()  # a deposed leader must not change the policies of its successor
            await self._management.put_policy(desired)
            self._applied[name] = desired
            self._log.info("delivery limit of a key applied", key=key, limit=self._limit_of(key))

    def _desired(self, key: Key, pool: PolicySpec) -> PolicySpec | None:
        limit = self._limit_of(key)
        if limit is None or limit == self._pool_limit or not self._queue_status[key].exists:
            return None
        return key_policy(pool, self._names, key, delivery_limit=limit)

    async def _delete(self, name: str) -> None:
        assert self._applied is not None
        await self._lease.confirm()
        await self._management.delete_policy(name)
        self._applied.pop(name, None)

"""Commands on request queues for the request queues loop, in the order that loses no request.

Bind, unbind and delete go over the token channel only. Queues are declared over other channels of the same connection,
several at a time: a declaration changes nothing for a queue that exists, and one of a leader that has lost the token
leaves at worst an empty, unbound queue, which the next leader finds and deletes (decision 0039). Passive declarations
use spare channels. So neither a refused declaration nor a missing queue costs the leader its token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

from osrdyne.aio.clock import Backoff, Clock, now_ms
from osrdyne.amqp import Channel, Delivery, QueueInfo
from osrdyne.broker.leadership.channel_pool import LeaderChannels
from osrdyne.broker.leadership.token import Send
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import TOTALS_MAX_AGE, QueueTotals
from osrdyne.broker.publishing.publisher import publish_until_taken
from osrdyne.broker.queues.durability import QueueDurability
from osrdyne.broker.queues.quarantine import Quarantine
from osrdyne.broker.queues.safe_delete import DeleteOutcome, QueueCheck, delete_if_proven_empty
from osrdyne.broker.topology.declarations import is_request_queue_of, request_queue_arguments
from osrdyne.broker.topology.layout import GroupQueue, QueueLayout
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerError,
    BrokerInternalError,
    BrokerNotFoundError,
    BrokerSilentError,
    BrokerUnavailableError,
    CommandRefusedError,
)
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.names import Key, QueueName

# A suspect queue counts as leaderless when so many consumers in a row got no answer: a queue that just started answers
# late.
LEADERLESS_SILENCES = 3
LEADERLESS_PAUSE = 5.0  # Seconds between two of these consumers.
LOOK_UP_RETRY = Backoff(initial=1.0, maximum=30.0)
REATTACH_TIME = 1.0  # Seconds in which a channel notices that the queue of its consumer was deleted.


class RequestQueueCommands:
    """The request queues of one pool, for one term."""

    def __init__(
        self,
        *,
        channels: LeaderChannels,
        management: ManagementClient,
        quarantine: Quarantine,
        durability: QueueDurability,
        layout: QueueLayout,
        clock: Clock,
        reattaches: bool = False,
    ) -> None:
        """`reattaches`: whether RabbitMQ may attach a consumer to a queue that is declared again
        (`BrokerVersion.reattaches_consumers`)."""
        self._names = layout.names
        self._token = channels.token
        self._spare_channels = channels.spare
        self._probe_channels = channels.probing
        self._declare_channels = channels.declaring
        self._publisher = channels.publisher
        self._management = management
        self._quarantine = quarantine
        self._durability = durability
        self._suspects: set[Key] = set()
        self._reattaches = reattaches
        self._layout = layout
        self._clock = clock
        self._log: Logger = get_logger("request_queues", pool=layout.names.pool)

    async def declare(self, key: Key) -> None:
        """Declare the queues of the group. Raises `BrokerConflictError` if one exists with other arguments.

        RabbitMQ compares the arguments of an existing queue itself, except for the one that holds the key. That
        argument matters only if the key is too long to be part of the queue's name; then the queue is looked up first.
        """
        used = [queue for queue in self._layout.queues(key) if queue.used]
        for queue in used:
            # One after the other, the default level last: a group that a killed leader has left unfinished lacks that
            # one.
            await self._declare(key, queue, last=queue is used[-1])

    def adopt(self, key: Key, levels: Iterable[int | None]) -> None:
        """Record queues of the group that a listing has found, by priority level."""
        for level in levels:
            self._layout.note(key, level)

    async def _declare(self, key: Key, queue: GroupQueue, *, last: bool = False) -> None:
        """Declare one queue. `last`: it is the last one that the group lacks. If no other key declares a queue at the
        moment, the wait for the declaration then also persists it; many new keys share the turns of `QueueDurability`
        instead."""
        arguments = request_queue_arguments(self._names, key)
        # The name of a long key holds a hash of it, and RabbitMQ does not compare the argument that holds the key
        # itself (broker: key-argument).
        if self._names.key_of_queue(self._names.request_queue(key), {}) is None and await self._exists(queue.name):
            await self._is_of_earlier_version(key, queue.name)
        try:
            alone = last and self._durability.is_idle
            if not alone or not await self._declare_alone(key, queue.name, arguments):
                await self._declare_concurrently(key, queue.name, arguments)
        except (BrokerConflictError, BrokerAccessError, BrokerNotFoundError) as error:
            # A queue that an earlier version has declared is used as it is.
            if not await self._is_of_earlier_version(key, queue.name):
                # The actor of this key tries again; the token and all other keys are not affected.
                raise BrokerConflictError(
                    f"RabbitMQ refuses the queue of this key: {error}", queue=queue.name
                ) from error
        # After the confirm: a bind relies on it, and a bind to a missing queue closes T.
        self._layout.note(key, queue.priority)

    async def _declare_alone(self, key: Key, queue: QueueName, arguments: Mapping[str, object]) -> bool:
        """Declare and persist the queue with one wait. False if the channel was closed without a reason."""
        try:
            await self._durability.declare(key, queue, arguments)
        except (BrokerSilentError, BrokerInternalError):
            raise
        except BrokerUnavailableError:
            # RabbitMQ may refuse the queue before the second command is sent, which then finds a closed channel without
            # a reason. A declaration with an answer gives the reason; without a connection it fails as well.
            return False
        return True

    async def _declare_concurrently(self, key: Key, queue: QueueName, arguments: Mapping[str, object]) -> None:
        """Declare the queue over a pooled channel, at the same time as those of other keys."""
        # Meanwhile `is_idle` is false, so that another new key is declared over a pooled channel, too.
        with self._durability.declaring():
            async with self._declare_channels.borrow() as channel:
                await channel.declare_queue(queue, arguments=arguments)
            self._durability.note(key)  # it may be new: the answer does not say

    async def _command(self, key: Key, command: Send, *, begin: Send | None = None) -> None:
        """Send a command that RabbitMQ may refuse over the token channel, unless the key is quarantined.

        A refusal is noted for every key whose command shared the answer. Until the note expires, commands of these keys
        are sent alone.
        """
        reason = self._quarantine.reason(key)
        if reason is not None:
            raise BrokerConflictError(f"RabbitMQ refuses the queue of this key; it is not used for a while: {reason}")
        try:
            # Without `begin` the command is sent alone: a second refusal is then noted for this key only.
            await self._token.do(command, begin=None if self._quarantine.is_suspected(key) else begin)
        except CommandRefusedError as error:
            self._quarantine.note(key, str(error))
            raise

    async def exists(self, key: Key) -> bool:
        """Whether the queue exists, by a passive declaration."""
        return await self._exists(self._names.request_queue(key))

    async def check(self, key: Key) -> QueueCheck:
        """Check with RabbitMQ whether the queues of the group exist and are bound. Changes nothing there.

        When this returns, a missing queue may be declared again.
        """
        known = self._layout.existing(key)
        missing = [queue for queue in known if not await self._exists(queue.name)]
        for queue in missing:
            # The next bind declares it first: a bind to a missing queue closes the token channel (lifecycle:
            # token-channel-never-fails).
            self._layout.note_missing(key, queue.priority)
        if missing and self._reattaches:
            # Before anything declares them again: the channels of their consumers must see first that they are gone, so
            # that RabbitMQ cancels the consumers (broker: reattached-consumers). Requests are orphans meanwhile.
            await self._clock.sleep(REATTACH_TIME)
        if any(queue.used for queue in missing):
            return QueueCheck.MISSING
        try:
            for queue in known:
                # AMQP cannot query a binding; the HTTP API can.
                if queue.used and not await self._management.has_binding(queue.exchange, queue.name, key):
                    return QueueCheck.UNBOUND
        except BrokerError as error:
            self._log.warning("binding check failed, binding again", key=key, error=str(error))
            return QueueCheck.UNKNOWN
        return QueueCheck.INTACT

    async def _exists(self, queue: QueueName) -> bool:
        try:
            async with self._spare_channels.borrow() as channel:
                await channel.declare_queue(queue, passive=True)
        except BrokerNotFoundError:
            return False
        return True

    async def _is_of_earlier_version(self, key: Key, queue: QueueName) -> bool:
        """Whether an earlier version has declared the queue. Raises `BrokerConflictError` if it has arguments of
        another program. Only the HTTP API returns them: while it fails, this key waits, and no other."""
        found = next((one for one in await self._list(queue) if one.name == queue), None)
        wanted = request_queue_arguments(self._names, key)
        if found is not None and not is_request_queue_of(self._names, key, found.arguments):
            raise BrokerConflictError(
                f"The queue {queue} exists with other arguments ({dict(found.arguments)} instead of {wanted}): "
                "drain and delete it, or use another pool.id.",
                queue=queue,
            )
        return found is not None and dict(found.arguments) != wanted

    async def _list(self, queue: QueueName) -> list[QueueTotals]:
        failures = 0
        while True:
            try:
                return await self._management.list_queues(queue)
            except BrokerError as error:
                failures += 1
                self._log.warning("request queue check failed", queue=queue, error=str(error))
                await self._clock.sleep(LOOK_UP_RETRY.delay(failures))

    async def bind(self, key: Key) -> None:
        """Bind the queues of the used levels of the group, and unbind the others. The used levels may change at any
        time."""
        # Before the bind: a request that is routed into a queue without a leader is never confirmed.
        await self._replace_leaderless(key)
        # Before the new bindings: a request that bypasses the ingress has no route and no deadline.
        if self._layout.managed:
            await self._leave_requests_exchange(key)
        done: set[GroupQueue] = set()
        # Routes may change during each await below: repeat until no level has come or gone. `GroupQueue` is compared by
        # value, `used` included, so that a queue whose level is not used any more is handled once more and unbound.
        while missing := set(self._layout.queues(key)) - done:
            queues = sorted(missing, key=lambda queue: queue.name)
            for queue in queues:
                if queue.used and self._layout.is_new(key, queue.priority):
                    await self._declare(key, queue)
            await self._durability.wait_persisted(key)  # before anything is confirmed in them (decision 0020)
            for queue in queues:
                if queue.used:
                    await self._command(
                        key, partial(_bind, queue=queue, key=key), begin=partial(_begin_bind, queue=queue, key=key)
                    )
                else:
                    # No route uses the level any more: nothing further may be routed into its queue.
                    await self._command(key, partial(_unbind, queue=queue, key=key))
            done |= missing

    def suspect(self, key: Key) -> None:
        """Note that the queue was found unbound: before it is bound or deleted, check that it has a Raft leader."""
        self._suspects.add(key)

    async def _replace_leaderless(self, key: Key) -> None:
        """Declare leaderless queues of a suspect key again.

        Before 4.0, a node that is killed after the declaration of a queue and before it is persisted comes back with a
        queue that never gets a leader (decision 0020). Such a queue was not bound yet, so it is empty. A queue of which
        a node is down may get its leader back: wait for that.
        """
        if key not in self._suspects:
            return
        for queue in self._layout.queues(key):
            silences = 0
            while not await self._answers(queue.name):
                silences += 1
                if silences >= LEADERLESS_SILENCES and await self._is_complete(queue.name):
                    self._log.error("request queue without a leader is declared again", key=key, queue=queue.name)
                    # Without a proof of emptiness: the queue was never bound in this state, so that no request was
                    # routed into it.
                    await self._command_delete(key, queue.name)
                    await self._declare(key, queue)
                    break
                await self._clock.sleep(LEADERLESS_PAUSE)
        self._suspects.discard(key)

    async def _answers(self, queue: QueueName) -> bool:
        """Whether the queue has a leader, or does not exist. Listings show a leaderless queue as running, and a passive
        declaration as empty; only a consumer gets no answer from it."""
        # Counts above zero come from a leader.
        if await self._look_up(queue) != QueueInfo(ready=0, consumers=0):
            return True
        try:
            async with self._probe_channels.borrow() as channel:
                try:
                    # The prefetch bounds what could arrive; closing the channel returns it.
                    await channel.consume(queue, prefetch=1)
                finally:
                    await channel.close()
        except BrokerNotFoundError:
            return True
        except BrokerUnavailableError:
            return False
        return True

    async def _is_complete(self, queue: QueueName) -> bool:
        """Whether every node that has a copy of the queue is up."""
        return all(found.members_online for found in await self._list(queue) if found.name == queue)

    async def unbind(self, key: Key) -> None:
        if self._layout.managed:
            await self._leave_requests_exchange(key)
        for queue in self._layout.queues(key):
            # All levels: one that stays bound would let requests into a queue that is about to be deleted.
            await self._token.do(partial(_unbind, queue=queue, key=key))

    async def _leave_requests_exchange(self, key: Key) -> None:
        """Remove the binding of a direct pool, which this pool may have been: requests must not bypass the ingress."""
        queue = self._names.request_queue(key)
        await self._token.do(
            lambda channel: channel.unbind_queue(queue, self._names.requests_exchange, routing_key=key)
        )

    async def delete_if_proven_empty(self, key: Key) -> DeleteOutcome:
        """Delete the queues of an unbound, settled group without workers, if no message of them is held.

        A queue that does not answer is kept, and delays no other key, because probes have channels of their own. If one
        queue is kept, the rest is kept too, and the next bind declares the deleted ones again.
        """
        await self._replace_leaderless(key)
        for queue in self._layout.queues(key):
            # The default level comes last. Crash between two queues: the next leader lists and deletes the rest.
            if queue.priority is not None and self._layout.is_new(key, queue.priority):
                # The level came into use after the group was unbound: such a queue belongs to another program.
                continue
            outcome = await self._delete(key, queue)
            if outcome is not DeleteOutcome.DELETED:
                return outcome
            self._layout.forget(key, queue.priority)
        await self._persist_deletion()
        return DeleteOutcome.DELETED

    async def delete_level(self, key: Key, priority: int) -> DeleteOutcome:
        """Delete the queue of a level that no route uses any more, if it holds no message."""
        for queue in self._layout.queues(key):
            if queue.priority == priority and not queue.used:
                outcome = await self._delete(key, queue)
                if outcome is DeleteOutcome.DELETED:
                    self._layout.forget(key, priority)
                    await self._persist_deletion()
                return outcome
        return DeleteOutcome.NOT_EMPTY  # the level is used again

    async def _delete(self, key: Key, queue: GroupQueue) -> DeleteOutcome:
        try:
            async with self._probe_channels.borrow() as channel:
                try:
                    return await delete_if_proven_empty(
                        channel,
                        queue.name,
                        # Over the token channel, so that a deposed leader deletes nothing (lifecycle:
                        # token-channel-fences).
                        delete=lambda: self._command_delete(key, queue.name),
                        give_back=partial(self._give_back, key, queue.exchange),
                    )
                finally:
                    await channel.close()
        except (BrokerUnavailableError, BrokerNotFoundError) as error:
            # A lost connection also ends the token channel, and with it the term.
            self._log.warning("probe failed", key=key, error=str(error))
            return DeleteOutcome.NO_EVIDENCE

    async def _command_delete(self, key: Key, queue: QueueName) -> int:
        # Never with if-empty or if-unused: quorum queues answer with 540 (broker: no-conditional-delete).
        count = await self._token.do(lambda channel: channel.delete_queue(queue))
        self._durability.note_deleted(key)
        return count

    async def _persist_deletion(self) -> None:
        """Persist the deletion: a node of 3.10 that is killed before confuses the next queue of this name with the
        deleted one (decision 0020)."""
        with suppress(BrokerConflictError):  # the deletion has succeeded; the next declaration reports the conflict
            await self._durability.persist()

    async def _give_back(self, key: Key, exchange: str, delivery: Delivery) -> None:
        """Republish a request that a probe received, and return once RabbitMQ has confirmed it: a deleted queue would
        not take it back."""
        request = delivery.to_request(now_ms=now_ms(self._clock))
        headers = dict(delivery.headers)
        if request.deadline_ms is not None:
            headers[DEADLINE_HEADER] = request.deadline_ms  # otherwise its time-to-live would start again
        # Crash before the confirm: the probe's channel ends, and RabbitMQ returns the request to its queue. Between
        # confirm and acknowledgement: a duplicate, which is allowed.
        # To the exchange, mandatory: the queue that it came from is deleted or about to be (lifecycle:
        # delete-under-probe).
        message = delivery.to_message(headers=headers, expiration=delivery.properties.expiration)
        await publish_until_taken(
            lambda: self._publisher.publish(message, exchange=exchange, routing_key=key, mandatory=True),
            clock=self._clock,
            log=self._log.bind(key=key),
        )

    async def count_ready(self, key: Key, priority: int | None) -> int:
        """Return the number of ready requests in the queue of this level now; 0 if it does not exist."""
        return (await self._look_up(self._names.request_queue(key, priority))).ready

    async def is_consumed(self, key: Key, *, beside: int) -> bool:
        """Whether more than `beside` connections consume the queue of the group.

        A worker has one connection, with several consumers of each queue if there are priorities. So the number of
        consumers suffices only for `beside` 0; otherwise the HTTP API lists their connections. If it fails, the queue
        counts as consumed: to keep a hanging worker for longer is better than to stop one that serves.
        """
        queue = self._names.request_queue(key)
        if (await self._look_up(queue)).consumers <= beside:
            return False
        return beside == 0 or (connections := await self._connections(queue)) is None or connections > beside

    async def waits_for_consumer(self, key: Key, *, beside: int) -> bool:
        """Whether requests wait in a queue of the group that at most `beside` connections consume.

        False for a queue that has lost its leader, which reports no requests.
        """
        for queue in self._layout.queues(key):
            found = await self._look_up(queue.name)
            if found.ready and (found.consumers <= beside or await self._has_at_most(queue.name, beside)):
                return True
        return False

    async def _has_at_most(self, queue: QueueName, connections: int) -> bool:
        """Whether at most so many connections consume a queue that has a consumer; False if that is unknown."""
        if connections == 0:
            return False
        found = await self._connections(queue)
        return found is not None and found <= connections

    async def _connections(self, queue: QueueName) -> int | None:
        """Return how many connections consume the queue now; None if the HTTP API does not answer."""
        # Its listings show a new consumer some seconds late (broker: totals-listing).
        await self._clock.sleep(TOTALS_MAX_AGE)
        try:
            return await self._management.count_consuming_connections(queue)
        except BrokerError as error:
            self._log.warning("consumers of a request queue cannot be listed", queue=queue, error=str(error))
            return None

    async def _look_up(self, queue: QueueName) -> QueueInfo:
        """Declare the queue passively; zero for one that does not exist."""
        try:
            async with self._spare_channels.borrow() as channel:
                return await channel.declare_queue(queue, passive=True)
        except BrokerNotFoundError:
            return QueueInfo(ready=0, consumers=0)


async def _bind(channel: Channel, *, queue: GroupQueue, key: Key) -> None:
    await channel.bind_queue(queue.name, queue.exchange, routing_key=key)


async def _begin_bind(channel: Channel, *, queue: GroupQueue, key: Key) -> None:
    await channel.begin_bind_queue(queue.name, queue.exchange, key)


async def _unbind(channel: Channel, *, queue: GroupQueue, key: Key) -> None:
    await channel.unbind_queue(queue.name, queue.exchange, routing_key=key)

"""Commands on request queues: what the request queues loop asks for, done in the way that loses nothing.

Bind, unbind and delete travel over the token channel only. Queues are declared over other channels of the same
connection, several at a time: a declaration changes nothing for a queue that exists, and one of a leader that has lost
the token leaves an empty, unbound queue at worst, which the next leader finds and deletes (decision 0039). Questions
are asked on spare channels. Neither a refused declaration nor a refused question costs the leader its token.
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
from osrdyne.broker.topology.declarations import request_queue_arguments
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

# How often a queue that was found unbound may leave a consumer without an answer; just started, it takes a moment.
LEADERLESS_SILENCES = 3
LEADERLESS_PAUSE = 5.0
LOOK_UP_RETRY = Backoff(initial=1.0, maximum=30.0)


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
    ) -> None:
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
        """Take over queues of the group that a listing has found, by priority level."""
        for level in levels:
            self._layout.note(key, level)

    async def _declare(self, key: Key, queue: GroupQueue, *, last: bool = False) -> None:
        """`last`: of those that the group lacks. Where no other key needs a queue at the moment, it is written down
        with the same wait; many new keys share the turns of `QueueDurability` instead."""
        arguments = request_queue_arguments(key)
        # The name of a long key holds a hash of it, and RabbitMQ does not compare the argument that holds the key
        # itself (broker: key-argument).
        if self._names.key_of_queue(self._names.request_queue(key), {}) is None and await self._exists(queue.name):
            await self._compare(queue.name, arguments)
        try:
            # One wait instead of two for a key that is new alone; many new keys share turns, which is faster for them.
            alone = last and self._durability.is_idle
            if not alone or not await self._declare_alone(key, queue.name, arguments):
                await self._declare_aside(key, queue.name, arguments)
        except (BrokerConflictError, BrokerAccessError, BrokerNotFoundError) as error:
            await self._compare(queue.name, arguments)
            # Retried by the actor of this key alone: the token and all other keys are not affected.
            raise BrokerConflictError(f"RabbitMQ refuses the queue of this key: {error}", queue=queue.name) from error
        # After the confirm: a bind relies on it, and a bind to a missing queue closes T.
        self._layout.note(key, queue.priority)

    async def _declare_alone(self, key: Key, queue: QueueName, arguments: Mapping[str, object]) -> bool:
        """Declare the queue and write it down with one wait. False when the channel was closed without a reason."""
        try:
            await self._durability.declare(key, queue, arguments)
        except (BrokerSilentError, BrokerInternalError):
            raise
        except BrokerUnavailableError:
            # RabbitMQ may refuse the queue before the second command is sent, which then finds a closed channel. A
            # declaration with an answer tells the reason; without a connection it fails as well.
            return False
        return True

    async def _declare_aside(self, key: Key, queue: QueueName, arguments: Mapping[str, object]) -> None:
        """Over one of the channels for declarations, at the same time as those of other keys."""
        # Counted while it is under way: another new key must not take the way that is only for one alone.
        with self._durability.declaring():
            async with self._declare_channels.borrow() as channel:
                await channel.declare_queue(queue, arguments=arguments)
            self._durability.note(key)  # it may be new; an answer does not say, and an earlier leader may have made it

    async def _command(self, key: Key, command: Send, *, begin: Send | None = None) -> None:
        """Send over the token channel what may be refused; a key that cost the token twice is left alone.

        A key whose command shared an answer with the one that was refused counts as well, once: until that is
        forgotten it goes alone.
        """
        reason = self._quarantine.reason(key)
        if reason is not None:
            raise BrokerConflictError(f"RabbitMQ refuses the queue of this key; it is not used for a while: {reason}")
        try:
            # A suspected key sends its command alone: if it is refused again, no other key shares the blame.
            await self._token.do(command, begin=None if self._quarantine.is_suspected(key) else begin)
        except CommandRefusedError as error:
            self._quarantine.note(key, str(error))
            raise

    async def exists(self, key: Key) -> bool:
        """Whether the queue exists, asked of the broker now."""
        return await self._exists(self._names.request_queue(key))

    async def check(self, key: Key) -> QueueCheck:
        """Whether the queues of the group exist and are bound, asked of the broker now. Changes nothing there.

        What is missing is declared again before the next bind, which would cost the leader its token otherwise.
        """
        known = self._layout.existing(key)
        missing = [queue for queue in known if not await self._exists(queue.name)]
        # A bind to a missing queue would be refused and close the token channel.
        for queue in missing:
            # The next bind then declares it first (lifecycle: token-channel-never-fails).
            self._layout.note_missing(key, queue.priority)
        if any(queue.used for queue in missing):
            return QueueCheck.MISSING
        try:
            for queue in known:
                # AMQP has no question about a binding: only the HTTP API can answer.
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

    async def _compare(self, queue: QueueName, arguments: Mapping[str, object]) -> None:
        """Raises `BrokerConflictError` when the queue exists with other arguments. Only the HTTP API tells them: while
        it fails, this queue waits for it, and nothing else does."""
        for found in await self._list(queue):
            if found.name == queue and dict(found.arguments) != arguments:
                raise BrokerConflictError(
                    f"The queue {queue} exists with other arguments ({dict(found.arguments)} instead of {arguments}): "
                    "drain and delete it, or use another pool.id.",
                    queue=queue,
                )

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
        """Bind the queues of the group, and unbind those that are not used any more. The levels in use may have
        changed since `declare`, and may change meanwhile."""
        # Before the bind: a request that is routed into a queue without a leader is never confirmed.
        await self._replace_leaderless(key)
        # Before the new bindings: a request that came past the ingress would have no route and no deadline.
        if self._layout.managed:
            await self._leave_requests_exchange(key)
        done: set[GroupQueue] = set()
        # Routes may change during each await below. Repeat until no level has come or gone meanwhile.
        # Compared as values: a level that is used no more is another queue for this purpose, and is unbound.
        while missing := set(self._layout.queues(key)) - done:
            queues = sorted(missing, key=lambda queue: queue.name)
            for queue in queues:
                if queue.used and self._layout.is_new(key, queue.priority):
                    await self._declare(key, queue)
            await self._durability.written(key)  # before anything is confirmed in them (decision 0020)
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
        """The queue was found unbound: before it is bound or deleted, make sure that it has a leader."""
        self._suspects.add(key)

    async def _replace_leaderless(self, key: Key) -> None:
        """A node that was killed between the declaration of a queue and its being written down comes back, before 4.0,
        with a queue that never gets a leader (decision 0020). It was not bound yet, so that nothing is in it: make it
        anew. One that has a node away may get its leader back, and is waited for.
        """
        if key not in self._suspects:
            return
        for queue in self._layout.queues(key):
            silences = 0
            while not await self._answers(queue.name):
                silences += 1
                # A queue that was just started takes a moment to answer, and one with a node away may get its leader
                # back.
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
        """Whether the queue has a leader, or is none. Only who consumes an empty one can tell: listings call it
        running, and a look-up finds it empty."""
        # An answer with a message or a consumer comes from a leader; only the answer of an empty queue is ambiguous.
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
        """The pool may have been a direct one: its requests must not go past the ingress."""
        queue = self._names.request_queue(key)
        await self._token.do(
            lambda channel: channel.unbind_queue(queue, self._names.requests_exchange, routing_key=key)
        )

    async def delete_if_proven_empty(self, key: Key) -> DeleteOutcome:
        """Delete the queues of an unbound, settled group without workers, if none of their messages is held.

        A queue that does not answer is no evidence, and delays only itself: probes have channels of their own.
        Where one is kept, the group goes on and makes the others again.
        """
        await self._replace_leaderless(key)
        for queue in self._layout.queues(key):
            # The default level comes last. Crash between two queues: the next leader lists those that are left, and
            # goes on.
            if queue.priority is not None and self._layout.is_new(key, queue.priority):
                # The level came into use after the group was unbound: such a queue belongs to another program.
                continue
            outcome = await self._delete(key, queue)
            if outcome is not DeleteOutcome.DELETED:
                # The rest stays: the loop plans anew from the outcome, and the group may be active again by then.
                return outcome
            self._layout.forget(key, queue.priority)
        await self._write_down_deletion()
        return DeleteOutcome.DELETED

    async def delete_level(self, key: Key, priority: int) -> DeleteOutcome:
        """Delete the queue of a level that no route uses any more, if it holds no message."""
        for queue in self._layout.queues(key):
            if queue.priority == priority and not queue.used:
                outcome = await self._delete(key, queue)
                if outcome is DeleteOutcome.DELETED:
                    self._layout.forget(key, priority)
                    await self._write_down_deletion()
                return outcome
        return DeleteOutcome.NOT_EMPTY  # it is used again, or will be in a moment

    async def _delete(self, key: Key, queue: GroupQueue) -> DeleteOutcome:
        try:
            async with self._probe_channels.borrow() as channel:
                try:
                    return await delete_if_proven_empty(
                        channel,
                        queue.name,
                        # Over the token channel: a leader that was deposed meanwhile deletes nothing (lifecycle:
                        # token-channel-fences).
                        delete=lambda: self._command_delete(key, queue.name),
                        give_back=partial(self._give_back, key, queue.exchange),
                    )
                finally:
                    await channel.close()
        except (BrokerUnavailableError, BrokerNotFoundError) as error:
            # Without the connection the token is lost too, and says so itself.
            self._log.warning("probe failed", key=key, error=str(error))
            return DeleteOutcome.NO_EVIDENCE

    async def _command_delete(self, key: Key, queue: QueueName) -> int:
        # Never with if-empty or if-unused: quorum queues answer with 540 (broker: no-conditional-delete).
        count = await self._token.do(lambda channel: channel.delete_queue(queue))
        self._durability.note_deleted(key)
        return count

    async def _write_down_deletion(self) -> None:
        """Killed before, RabbitMQ 3.10 confuses the next queue of this name with the old one (decision 0020)."""
        with suppress(BrokerConflictError):  # the bind has succeeded; the next declaration reports the conflict
            await self._durability.write()

    async def _give_back(self, key: Key, exchange: str, delivery: Delivery) -> None:
        """Return once the broker has the request again; a deleted queue would not take it back."""
        request = delivery.to_request(now_ms=now_ms(self._clock))
        headers = dict(delivery.headers)
        if request.deadline_ms is not None:
            headers[DEADLINE_HEADER] = request.deadline_ms  # or its time would start anew
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
        """Requests that wait in the queue of this level now; 0 if it does not exist."""
        return (await self._look_up(self._names.request_queue(key, priority))).ready

    async def is_consumed(self, key: Key, *, beside: int) -> bool:
        """Whether more than `beside` connections consume the queue of the group.

        A worker has one connection, and with priorities several consumers of each queue on it. So consumers are
        counted only where any would do; otherwise the HTTP API names their connections. If it does not, the queue
        counts as consumed: a worker that serves must not be stopped.
        """
        queue = self._names.request_queue(key)
        if (await self._look_up(queue)).consumers <= beside:
            return False
        # An unknown number counts as consumed: to keep a hanging worker for longer is better than to stop one that
        # serves.
        return beside == 0 or (connections := await self._connections(queue)) is None or connections > beside

    async def waits_for_consumer(self, key: Key, *, beside: int) -> bool:
        """Whether requests wait in a queue of the group that no more than `beside` connections consume.

        A queue that has lost its leader says that it has neither requests nor consumers.
        """
        for queue in self._layout.queues(key):
            found = await self._look_up(queue.name)
            if found.ready and (found.consumers <= beside or await self._has_at_most(queue.name, beside)):
                return True
        return False

    async def _has_at_most(self, queue: QueueName, connections: int) -> bool:
        """Whether so few connections consume the queue, as far as the HTTP API answers."""
        if connections == 0:
            return False  # it has a consumer
        found = await self._connections(queue)
        return found is not None and found <= connections

    async def _connections(self, queue: QueueName) -> int | None:
        """How many connections consume the queue; None where that is not known.

        RabbitMQ shows a new consumer after some seconds, so the question waits for those of now.
        """
        # RabbitMQ shows a new consumer in its listings some seconds late (broker: totals-listing).
        await self._clock.sleep(TOTALS_MAX_AGE)
        try:
            return await self._management.count_consuming_connections(queue)
        except BrokerError as error:
            self._log.warning("consumers of a request queue cannot be listed", queue=queue, error=str(error))
            return None

    async def _look_up(self, queue: QueueName) -> QueueInfo:
        """What the queue says now; one that does not exist has nothing."""
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

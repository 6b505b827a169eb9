"""What the pool may expect of request queues, on the broker in memory and on RabbitMQ: the same suite for both.

Commands, listing, token and probes are the real ones in both cases; what differs is what they talk to.
"""

import asyncio
from dataclasses import dataclass

import pytest
from leader_terms import LeaderTerm

from osrdyne.amqp import Channel, Message
from osrdyne.broker.management.listings import RequestQueueListing
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.queues.safe_delete import DeleteOutcome
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerConflictError
from osrdyne.protocol.names import Key, PoolNames, QueueName
from osrdyne.testing.keys import ODD_KEYS

A = Key("a")


@dataclass
class Leader:
    """A leader's commands, and the view of a client or worker beside it."""

    term: LeaderTerm
    queues: RequestQueueCommands
    listing: RequestQueueListing

    @property
    def names(self) -> PoolNames:
        return self.term.names

    async def channel(self, *, confirms: bool = False) -> Channel:
        """A channel of another process."""
        return await self.term.channel(confirms=confirms)

    async def publish(self, key: str, body: bytes = b"1") -> None:
        channel = await self.channel(confirms=True)
        await channel.publish(Message(body=body), exchange=self.names.requests_exchange, routing_key=key)
        await channel.close()

    async def drain(self, queue: str) -> list[bytes]:
        """Everything that is ready in a queue."""
        channel, bodies = await self.channel(), []
        while (delivery := await channel.get(queue)) is not None:
            bodies.append(delivery.body)
            await delivery.ack()
        await channel.close()
        return bodies

    async def adopt_listed(self) -> None:
        """Take over the existing queues, as a new leader does."""
        for queue in await self.listing.list_request_queues():
            self.queues.adopt(queue.key, queue.ready_by_level)

    async def bound(self, key: Key = A) -> QueueName:
        await self.queues.declare(key)
        await self.queues.bind(key)
        return self.names.request_queue(key)

    async def unbound(self, key: Key = A, *bodies: bytes) -> QueueName:
        """A queue of the key that is there, with these requests, and not bound."""
        queue = await self.bound(key)
        for body in bodies:
            await self.publish(key, body)
        await self.queues.unbind(key)
        return queue

    async def orphan(self) -> bytes:
        consumer = await (await self.channel()).consume(self.names.orphan_queue)
        return (await consumer.get()).body


@pytest.fixture
async def leader(lead):
    async with lead() as term:
        queues = term.session.request_queues(term.management)
        yield Leader(term, queues, RequestQueueListing(term.management, term.names))


class TestDeclareAndBind:
    async def test_bound_queue_gets_the_requests_of_its_key_and_others_are_orphans(self, leader):
        await leader.queues.declare(A)
        await leader.publish("a", b"early")
        assert await leader.orphan() == b"early"
        queue = await leader.bound()
        await leader.publish("a")
        assert await leader.drain(queue) == [b"1"]

    async def test_everything_may_be_done_twice(self, leader):
        await leader.queues.unbind(A)  # what does not exist
        for step in (leader.queues.declare, leader.queues.bind) * 2 + (leader.queues.unbind,) * 2:
            await step(A)
        for _ in range(2):
            assert await leader.queues.delete_if_proven_empty(A) is DeleteOutcome.DELETED
        assert await leader.listing.list_request_queues() == []
        assert not leader.term.keeping.done()

    @pytest.mark.proves("reference-defects/9-keys-were-bound")
    async def test_odd_keys_have_queues_of_their_own_and_are_listed_as_they_are(self, leader):
        for key in ODD_KEYS.values():
            await leader.bound(key)
        listed = await leader.listing.list_request_queues()
        assert sorted((queue.key, queue.bound, queue.ready) for queue in listed) == [
            (key, True, 0) for key in sorted(ODD_KEYS.values())
        ]
        for name, key in ODD_KEYS.items():
            await leader.publish(key, name.encode())
        found = {name: await leader.drain(leader.names.request_queue(key)) for name, key in ODD_KEYS.items()}
        assert found == {name: [name.encode()] for name in ODD_KEYS}

    async def test_queue_that_is_not_ours_is_a_conflict_is_not_listed_and_costs_no_leadership(self, leader):
        """lifecycle: token-channel-never-fails. RabbitMQ does not compare the argument that holds the key; the name of
        the queue holds a short one only."""
        channel, long = await leader.channel(), Key("a" * 300)
        await channel.declare_queue(leader.names.request_queue(A), arguments={"x-queue-type": "classic"})
        with pytest.raises(BrokerConflictError, match="arguments"):
            await leader.queues.declare(A)
        await leader.queues.declare(Key("b"))
        assert [queue.key for queue in await leader.listing.list_request_queues()] == ["b"]
        arguments = {"x-queue-type": "quorum", "x-osrdyne-key": "b"}
        await channel.declare_queue(leader.names.request_queue(long), arguments=arguments)
        with pytest.raises(BrokerConflictError, match="arguments"):
            await leader.queues.declare(long)
        assert not leader.term.keeping.done()

    async def test_consumers_and_requests_that_wait_for_one_are_seen(self, leader):
        assert not await leader.queues.is_consumed(A, beside=0)
        queue = await leader.bound()
        assert not await leader.queues.is_consumed(A, beside=0)
        assert not await leader.queues.waits_for_consumer(A, beside=0)
        for _ in range(2):
            await leader.publish(A)
        await wait_ready(leader, queue, 2)
        assert await leader.queues.waits_for_consumer(A, beside=0)
        await (await leader.channel()).consume(queue, prefetch=1)
        await wait_ready(leader, queue, 1)
        assert [await leader.queues.is_consumed(A, beside=beside) for beside in (0, 1)] == [True, False]
        assert [await leader.queues.waits_for_consumer(A, beside=beside) for beside in (0, 1)] == [False, True]


class TestDelete:
    """lifecycle: "Deleting a queue"."""

    @pytest.mark.parametrize("way", ["consumer", "cancelled consumer", "get"])
    @pytest.mark.proves("reference-defects/7-queue-deleted-under")
    async def test_unacknowledged_request_of_any_consumer_keeps_the_queue(self, leader, way):
        """[ev1_ready, ev6_drain] also of a worker that has cancelled its consumer, or never had one."""
        queue, channel = await leader.unbound(A, b"1"), await leader.channel()
        if way == "get":
            assert await channel.get(queue) is not None
        else:
            consumer = await channel.consume(queue)
            assert (await consumer.get()).body == b"1"
            if way == "cancelled consumer":
                await channel.cancel(consumer)
        assert await leader.queues.delete_if_proven_empty(A) is DeleteOutcome.IN_USE
        await channel.close()
        await wait_ready(leader, queue, 1)
        assert await leader.queues.delete_if_proven_empty(A) is DeleteOutcome.NOT_EMPTY
        assert await leader.drain(queue) == [b"1"]

    async def test_queue_of_an_idle_worker_is_in_use_and_a_refused_deletion_leaves_no_consumer_behind(self, leader):
        queue, channel = await leader.unbound(), await leader.channel()
        await channel.consume(queue)
        for _ in range(6):  # more often than there are spare channels
            assert await leader.queues.delete_if_proven_empty(A) is DeleteOutcome.IN_USE
        # The consumer of a closed channel goes a little later.
        while (await channel.declare_queue(queue, passive=True)).consumers != 1:
            await asyncio.sleep(0.02)

    async def test_many_deletions_side_by_side(self, leader):
        keys = [Key(str(number)) for number in range(40)]
        for key in keys:
            await leader.queues.declare(key)
            await leader.queues.unbind(key)
        outcomes = await asyncio.gather(*(leader.queues.delete_if_proven_empty(key) for key in keys))
        assert outcomes == [DeleteOutcome.DELETED] * 40


async def test_unacknowledged_requests_are_counted(leader):
    """lifecycle: idle-needs-a-fresh-total. A listing may be some seconds old."""
    queue = await leader.bound()
    await leader.queues.declare(Key("b"))
    await leader.publish("a")
    await leader.publish("a")
    channel = await leader.channel()
    await channel.get(queue)
    totals = {}
    while {key: total.messages for key, total in totals.items()} != {"a": 2, "b": 0}:
        await asyncio.sleep(0.1)
        totals = await leader.listing.list_message_totals()
        assert totals.keys() <= {"a", "b"}


async def wait_ready(leader: Leader, queue: str, ready: int) -> None:
    channel = await leader.channel()
    while (await channel.declare_queue(queue, passive=True)).ready != ready:
        await asyncio.sleep(0.02)


class TestPriorityClasses:
    """The queues of a group in a managed pool."""

    async def managed(self, leader: Leader, *priorities: int) -> Leader:
        """The same leader with the layout of a managed pool."""
        layout = QueueLayout(leader.names, managed=True, priorities=priorities)
        term = leader.term
        await term.session.declare(layout.exchanges)
        queues = term.session.request_queues(term.management, layout)
        return Leader(term, queues, RequestQueueListing(term.management, term.names, layout))

    async def publish(self, leader: Leader, priority: int | None, body: bytes) -> None:
        channel = await leader.channel(confirms=True)
        await channel.publish(Message(body=body), exchange=leader.names.work_exchange(priority), routing_key="a")
        await channel.close()

    async def test_each_class_has_a_queue_of_its_own_after_the_next_bind_and_the_group_is_listed_once(self, leader):
        await leader.bound()  # by the leader of a direct pool
        await (await self.managed(leader, 0)).bound()
        leader = await self.managed(leader, 0, 7)
        await leader.queues.bind(A)
        for priority in (0, 7, None):
            await self.publish(leader, priority, str(priority).encode())
        while sum(queue.messages for queue in await leader.listing.list_request_queues()) != 3:
            await asyncio.sleep(0.1)  # RabbitMQ's totals are some seconds old
        assert [(queue.key, queue.bound) for queue in await leader.listing.list_request_queues()] == [("a", True)]
        queues = [leader.names.request_queue(A, priority) for priority in (0, 7, None)]
        assert [await leader.drain(queue) for queue in queues] == [[b"0"], [b"7"], [b"None"]]
        await leader.publish("a")  # as a client, which knows no class
        assert await leader.orphan() == b"1"

    @pytest.mark.proves("controller/leader-dies-declared-some")
    async def test_queue_that_a_killed_leader_had_not_declared_exists_after_the_next_bind(self, leader):
        """It declares the stores first: a group may be listed that has no queue of the default class."""
        before = await self.managed(leader, 3)
        await before.queues.declare(A)
        await (await leader.channel()).delete_queue(leader.names.request_queue(A))
        after = await self.managed(leader, 3)
        await after.adopt_listed()
        await after.queues.bind(A)
        await self.publish(after, None, b"1")
        assert await leader.drain(leader.names.request_queue(A)) == [b"1"]

    async def test_request_in_any_class_keeps_the_group(self, leader):
        leader = await self.managed(leader, 0)
        for priority in (0, None):
            await leader.bound()
            await self.publish(leader, priority, b"1")
            await leader.queues.unbind(A)
            assert await leader.queues.delete_if_proven_empty(A) is DeleteOutcome.NOT_EMPTY
            await leader.queues.bind(A)
            assert await leader.drain(leader.names.request_queue(A, priority)) == [b"1"]

    async def test_unused_priority_queue_takes_no_message_and_is_deleted_alone_once_it_is_empty(self, leader):
        before = await self.managed(leader, 5)
        await before.bound()
        await self.publish(before, 5, b"1")
        after = await self.managed(leader)
        await after.adopt_listed()
        await after.queues.bind(A)
        assert await after.queues.delete_level(A, 5) is DeleteOutcome.NOT_EMPTY
        assert await after.drain(after.names.request_queue(A, 5)) == [b"1"]
        await self.publish(after, 5, b"2")
        assert await after.orphan() == b"2"
        assert await after.queues.delete_level(A, 5) is DeleteOutcome.DELETED
        assert await after.queues.exists(A)
        assert await after.listing.list_level_totals() == {}

    async def test_empty_group_goes_with_all_its_queues_of_unused_levels_too(self, leader):
        before = await self.managed(leader, 0, 5)
        await before.queues.declare(A)
        after = await self.managed(leader, 0)
        await after.adopt_listed()
        await after.queues.unbind(A)
        assert await after.queues.delete_if_proven_empty(A) is DeleteOutcome.DELETED
        assert await before.listing.list_request_queues() == []

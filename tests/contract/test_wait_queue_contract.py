"""What the pool may expect of wait queues, on the broker in memory and on RabbitMQ: the same suite for both."""

import asyncio
from dataclasses import dataclass

import pytest
from leader_terms import LeaderTerm

from osrdyne.amqp import Channel, Message
from osrdyne.broker.queues.retry_queues import RetryQueueCommands
from osrdyne.broker.queues.safe_delete import DeleteOutcome
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import PublishRefusedError
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.retries import CLASS_HEADER, DELAY_HEADER, class_name

SHORT, LONG = 200, 3_600_000
CLASSES = (None, 3)


@dataclass
class Leader:
    """A leader's commands, and a channel of another process."""

    term: LeaderTerm
    waits: RetryQueueCommands
    channel: Channel

    @property
    def names(self) -> PoolNames:
        return self.term.names

    async def wait(self, delay_ms: int, priority: int | None = None) -> None:
        """Send a request to wait, as a worker does."""
        headers = {DELAY_HEADER: str(delay_ms), CLASS_HEADER: class_name(priority)}
        message = Message(class_name(priority).encode(), headers=headers)
        await self.channel.publish(message, exchange=self.names.retry_exchange, routing_key="key", mandatory=True)

    async def time_out(self) -> None:
        """The short delay passes; in memory a time-to-live has to be said."""
        if self.term.memory is not None:
            self.term.memory.expire(self.names.retry_queue(SHORT))

    async def next_of(self, queue: str) -> bytes:
        async with asyncio.timeout(60):
            return (await (await self.channel.consume(queue)).get()).body


@pytest.fixture
async def leader(lead):
    async with lead() as term:
        await term.session.declare(QueueLayout(term.names, managed=True, priorities=[3]).exchanges)
        yield Leader(term, term.session.retry_queues(term.management), await term.channel(confirms=True))


async def test_requests_come_back_to_their_classes_or_as_orphans(leader):
    await leader.waits.declare([SHORT, LONG], [3])
    await leader.waits.declare([SHORT, LONG], [3])  # as often as one likes
    for priority in CLASSES:
        queue = f"{leader.names.pool}-req-{class_name(priority)}"
        await leader.channel.declare_queue(queue, arguments={"x-queue-type": "quorum"})
        await leader.channel.bind_queue(queue, leader.names.work_exchange(priority), "key")
        await leader.wait(SHORT, priority)
    await leader.time_out()
    found = [await leader.next_of(f"{leader.names.pool}-req-{class_name(priority)}") for priority in CLASSES]
    assert found == [b"default", b"3"]
    await leader.channel.delete_queue(f"{leader.names.pool}-req-3")
    await leader.wait(SHORT, 3)
    await leader.time_out()
    assert await leader.next_of(leader.names.orphan_queue) == b"3"


async def test_pool_that_became_direct_gets_what_has_waited_as_orphans(leader):
    await leader.waits.leave_default_level()  # nothing of it is there yet
    await leader.waits.declare([SHORT], [])
    await leader.waits.leave_default_level()
    queue = f"{leader.names.pool}-req-key"
    await leader.channel.declare_queue(queue, arguments={"x-queue-type": "quorum"})
    await leader.channel.bind_queue(queue, leader.names.work_exchange(), "key")
    await leader.wait(SHORT)
    await leader.time_out()
    assert await leader.next_of(leader.names.orphan_queue) == b"default"


async def test_queues_are_listed_unbound_and_deleted_once_nothing_waits(leader):
    waits = leader.waits
    await waits.declare([SHORT, LONG], [])
    await leader.channel.declare_queue(f"{leader.names.pool}-retry-other", arguments={"x-queue-type": "quorum"})
    assert set(await waits.list()) == {SHORT, LONG}
    await leader.wait(LONG)
    await waits.unbind(LONG)
    with pytest.raises(PublishRefusedError):
        await leader.wait(LONG)
    outcomes = [await waits.delete_if_proven_empty(delay) for delay in (LONG, SHORT, SHORT)]
    assert outcomes == [DeleteOutcome.NOT_EMPTY, DeleteOutcome.DELETED, DeleteOutcome.DELETED]
    assert set(await waits.list()) == {LONG}


async def test_queue_with_other_arguments_is_reported_and_costs_neither_leader_nor_other_delays(leader):
    queue = leader.names.retry_queue(SHORT)
    await leader.channel.declare_queue(queue, arguments={"x-queue-type": "quorum"})
    refused = await leader.waits.declare([SHORT, LONG], [])
    assert refused.keys() == {SHORT}
    assert queue in refused[SHORT]
    await leader.wait(LONG)
    await leader.term.session.token.confirm()

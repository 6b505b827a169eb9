"""Snapshots of one leader for the next, on the broker in memory and on RabbitMQ: the same suite for both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
from leader_terms import LeaderTerm, leading

from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import Message
from osrdyne.broker.queues.snapshots import SnapshotQueue
from osrdyne.config.models import PoolSettings, Settings
from osrdyne.errors import LeadershipLostError
from osrdyne.testing.fakes.amqp import FakeConnection, connect_to
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.management import FakeManagement

NAME = "test"


class Leader:
    def __init__(self, term: LeaderTerm) -> None:
        self.session, self.keeping = term.session, term.keeping
        self.management = term.management
        self.snapshots: SnapshotQueue = term.session.snapshots(NAME, term.management)

    async def queues(self) -> list[str]:
        return [one.name for one in await self.management.list_queues(self.session.names.snapshot_queue_prefix(NAME))]


@asynccontextmanager
async def saving(beginning: AbstractAsyncContextManager[LeaderTerm]) -> AsyncIterator[Leader]:
    async with beginning as term:
        yield Leader(term)


Lead = Callable[[], AbstractAsyncContextManager[Leader]]


@pytest.fixture
def lead(lead):
    return lambda: saving(lead())


@pytest.mark.proves("controller/leader-dies-saves-snapshot")
async def test_next_leader_reads_the_latest_snapshot_and_replaces_it_with_its_first(lead):
    async with lead() as first:
        assert await first.snapshots.read() is None
        for content in (b"1", b"2", b"3"):
            await first.snapshots.write(content)
        names, term = first.session.names, first.session.token.term
        await (await first.session.publishing.channel()).delete_queue(names.snapshot_queue(NAME, term))
        await first.snapshots.write(b"4")
    for _ in range(2):  # a leader that saves nothing leaves it where it is
        async with lead() as later:
            assert await later.snapshots.read() == b"4"
    async with lead() as later:
        await later.snapshots.write(b"5")
        assert await later.queues() == [names.snapshot_queue(NAME, later.session.token.term)]
    async with lead() as last:
        assert await last.snapshots.read() == b"5"


@pytest.mark.proves("controller/leader-lost-token-saves")
async def test_late_snapshot_of_an_earlier_leader_replaces_nothing(lead):
    async with lead() as first:
        await first.snapshots.write(b"1")
        # The token goes with this connection; the one for publishing stays.
        await first.session.control.close()
        async with lead() as second:
            assert await second.snapshots.read() == b"1"
            await second.snapshots.write(b"2")
            with pytest.raises(LeadershipLostError):
                await first.snapshots.write(b"late")
        async with lead() as third:
            assert await third.snapshots.read() == b"2"


@pytest.mark.proves("controller/message-queue-snapshots-leader")
async def test_message_of_another_user_is_not_a_snapshot_and_hides_none(lead):
    async with lead() as first:
        await first.snapshots.write(b"0")
        await publish(first, b"forged", user=None)  # in its place: the queue holds one message
    async with lead() as second:
        assert await second.snapshots.read() is None
        names, term = second.session.names, second.session.token.term
        channel = await second.session.publishing.channel()
        # As another program may declare it: without a limit.
        await channel.declare_queue(names.snapshot_queue(NAME, term), arguments={"x-queue-type": "quorum"})
        await publish(second, b"forged", user=None)
        await publish(second, b"1", user=second.session.token.user)
    async with lead() as third:
        assert await third.snapshots.read() == b"1"  # behind a forged one
        await third.snapshots._declare()  # and its term ends before it has stored one
        await publish(third, b"forged", user=None)
    async with lead() as fourth:
        assert await fourth.snapshots.read() == b"1"  # of the term before
        await fourth.snapshots.write(b"4")
        assert len(await fourth.queues()) == 1


async def publish(leader: Leader, body: bytes, *, user: str | None) -> None:
    """Publish into the snapshot queue of the leader's term."""
    queue = leader.session.names.snapshot_queue(NAME, leader.session.token.term)
    channel = await leader.session.publishing.channel(confirms=True)
    await channel.publish(Message(body=body, user_id=user), exchange="", routing_key=queue)


@dataclass
class Countdown:
    """Kills the leader at the command after `left` others."""

    left: int
    broker: FakeBroker
    connections: list[FakeConnection]

    async def __call__(self, command: Command) -> None:
        self.left -= 1
        if self.left < 0:
            self.broker.hook = None
            for connection in self.connections:
                connection.cut()


@pytest.mark.proves("controller/leader-dies-saves-snapshot")
async def test_leader_killed_at_any_step_leaves_the_former_snapshot_or_the_new_one():
    steps = 0
    while True:
        broker = FakeBroker(SystemClock())
        settings, management = Settings(pool=PoolSettings(id="p")), FakeManagement(broker)
        async with saving(leading(settings, connect_to(broker), management)) as first:
            await first.snapshots.write(b"old")
        connections: list[FakeConnection] = []
        finished = False
        async with saving(leading(settings, connect_to(broker, connections), management)) as second:
            countdown = Countdown(steps, broker, connections)
            broker.hook = countdown
            writing = asyncio.create_task(second.snapshots.write(b"new"))
            await asyncio.wait({writing, second.keeping}, return_when=asyncio.FIRST_COMPLETED)
            finished = countdown.left >= 0
            broker.hook = None
            writing.cancel()
            await asyncio.wait({writing})
            assert not finished or writing.exception() is None
        async with saving(leading(settings, connect_to(broker), management)) as third:
            assert await third.snapshots.read() in ([b"new"] if finished else [b"old", b"new"]), steps
        if finished:
            assert steps > 8
            return
        steps += 1

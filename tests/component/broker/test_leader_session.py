"""The connections of a standby or leader: one that is lost, and the end of all. In virtual time."""

import asyncio
from typing import Any

import pytest

from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message
from osrdyne.broker.session import LeaderSession
from osrdyne.errors import BrokerAccessError, BrokerConflictError, BrokerError, BrokerUnavailableError
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection, connect_to
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import settings_for

SETTINGS = settings_for()
CLOSE_TIMEOUT = 10.0


class SilentConnection(FakeConnection):
    """RabbitMQ does not answer the close, which takes as long as it can."""

    async def close(self, *, timeout: float = CLOSE_TIMEOUT) -> None:
        await self.broker.clock.sleep(timeout)
        await super().close()


class RefusingConnection(FakeConnection):
    """RabbitMQ refuses the first message of each channel that has its user in it."""

    def __init__(self, broker: FakeBroker, options: ConnectionOptions, refusal: BrokerError) -> None:
        super().__init__(broker, options)
        self._refusal = refusal

    async def channel(self, *, confirms: bool = False) -> Channel:
        channel = await super().channel(confirms=confirms)
        publish = channel.publish

        async def refuse(message: Message, **to: Any) -> None:
            channel.publish = publish  # type: ignore[method-assign]
            if message.user_id is not None:
                raise self._refusal
            await publish(message, **to)

        channel.publish = refuse  # type: ignore[method-assign]
        return channel


@pytest.mark.proves("controller/leader-queue-holds-something")
async def test_user_stays_verified_after_permissions_were_missing(clock: VirtualClock, broker: FakeBroker) -> None:
    """A session that opens while a permission is missing must not lead later without the verified user."""

    async def opened(refusal: BrokerError) -> LeaderSession:
        async def connect(options: ConnectionOptions) -> Connection:
            return RefusingConnection(broker, options, refusal)

        return await LeaderSession(SETTINGS, clock=clock, connect=connect).__aenter__()

    with pytest.raises(BrokerAccessError):
        await opened(BrokerAccessError("access to exchange 'amq.default' refused"))
    session = await opened(BrokerConflictError("user_id property set to 'a' but authenticated user was 'b'"))
    assert session.token.user is None
    await session.close()


async def open_silently(clock: VirtualClock, broker: FakeBroker) -> LeaderSession:
    async def connect(options: ConnectionOptions) -> Connection:
        return SilentConnection(broker, options)

    return await LeaderSession(SETTINGS, clock=clock, connect=connect).__aenter__()


def are_closed(session: LeaderSession) -> list[bool]:
    return [connection.is_closed for connection in (session.control, session.publishing, session.consuming)]


@pytest.mark.parametrize("purpose", ["leader", "publisher", "consumer"])
@pytest.mark.proves("controller/standby-loses-one-connections")
async def test_standby_without_a_connection_does_not_lead(clock, broker, purpose):
    """Its term would end at once, and requests would wait until the next one begins."""
    connections: list[FakeConnection] = []
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as leader:
        _, first = await leader.acquire()
        async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker, connections)) as standby:
            waiting = asyncio.create_task(standby.acquire())
            await clock.settle()
            lost = next(one for one in connections if f" {purpose} " in one.options.name)
            lost.cut(BrokerUnavailableError("Connection reset by peer"))
            await clock.settle()
            assert waiting.done()
            with pytest.raises(BrokerUnavailableError, match=purpose):
                await waiting
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as next_leader:
        previous, _ = await next_leader.acquire()
    assert previous == first


async def test_cancelled_wait_for_the_token_leaves_no_task(clock, broker):
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as leader:
        await leader.acquire()
        async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as standby:
            before = asyncio.all_tasks()
            waiting = asyncio.create_task(standby.acquire())
            await clock.settle()
            waiting.cancel()
            await asyncio.wait({waiting})
            await clock.settle()
            assert asyncio.all_tasks() == before


@pytest.mark.proves("controller/rabbitmq-answer-leader-standby")
async def test_cancelled_close_closes_every_connection(clock, broker):
    """An open one would keep the token, and no daemon would lead."""
    session = await open_silently(clock, broker)
    closing = asyncio.create_task(session.close())
    await clock.advance(1.0)
    closing.cancel()
    await clock.advance(CLOSE_TIMEOUT)
    assert (closing.cancelled(), are_closed(session)) == (True, [True, True, True])


@pytest.mark.parametrize("leads", [False, True], ids=["standby", "leader that has lost the token"])
@pytest.mark.proves("controller/rabbitmq-answer-leader-standby")
async def test_connections_that_stay_open_are_given_up_together(clock, broker, leads):
    session = await open_silently(clock, broker)
    if leads:
        _, token = await session.acquire()
        running = asyncio.create_task(session.run(token))
        await clock.settle()
        broker.delete_queue(session.names.leader_queue)
        await clock.settle()
        assert isinstance(running.exception(), BaseExceptionGroup)
    closing = asyncio.create_task(session.close())
    await clock.advance(CLOSE_TIMEOUT)
    assert (closing.done(), are_closed(session)) == (True, [True, True, True])

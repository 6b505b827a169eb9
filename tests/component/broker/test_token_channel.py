"""The token channel on a broker in memory: the lease, and a token that comes back late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from osrdyne.amqp import Delivery
from osrdyne.broker.leadership.token import RENEW_EVERY, TOKEN_TIMEOUT, Token, TokenChannel
from osrdyne.broker.session import LeaderSession
from osrdyne.errors import LeadershipLostError
from osrdyne.protocol.names import PoolNames
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel, connect_to
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import POOL, settings_for

SETTINGS = settings_for()
LEASE = SETTINGS.broker.leader_heartbeat / 2


class Pings:
    """Counts what is asked over T; each answer takes `delay` seconds."""

    def __init__(self, broker: FakeBroker, clock: VirtualClock) -> None:
        self.count = 0
        self.delay = 0.0
        self._clock = clock
        broker.hook = self._pass

    async def _pass(self, command: Command) -> None:
        if command.name == "ping" and command.done:
            self.count += 1
            await self._clock.sleep(self.delay)


@asynccontextmanager
async def leading_token(broker: FakeBroker, clock: VirtualClock) -> AsyncIterator[TokenChannel]:
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as session:
        _, token = await session.token.acquire()
        running = asyncio.create_task(session.token.run(token, renew_interval=RENEW_EVERY))
        await clock.settle()
        try:
            yield session.token
        finally:
            running.cancel()
            await asyncio.wait({running})


@pytest.mark.proves("controller/process-leader-stopped-continues")
async def test_answer_that_is_read_late_does_not_prove_the_lead(clock, broker):
    """lifecycle: lease. As after SIGSTOP: RabbitMQ has answered, and has given the token to another daemon since."""
    pings = Pings(broker, clock)
    async with leading_token(broker, clock) as token:
        await clock.advance(LEASE + 0.1)
        pings.delay = 10 * LEASE
        first = asyncio.create_task(token.confirm())
        await clock.advance(pings.delay)
        pings.delay = 0.0
        await first
        await token.confirm()
        assert pings.count == 2
        await token.confirm()
        assert pings.count == 2


async def test_token_that_comes_back_just_too_late_is_no_unexpected_error(clock, broker, monkeypatch):
    """It is read after the time is over, and before the tasks of the term have ended."""
    async with LeaderSession(SETTINGS, clock=clock, connect=connect_to(broker)) as session:
        _, own = await session.token.acquire()
        token = session.token

        async def come_back_late(message):
            def arrive():
                assert token._consumer is not None
                token._consumer.put(Delivery(token._channel, 99, "", "", False, message.body, message.properties()))

            clock.call_later(TOKEN_TIMEOUT, arrive)

        monkeypatch.setattr(token, "_publish_token", come_back_late)
        running = asyncio.create_task(token.run(own, renew_interval=1.0))
        await clock.advance(1.0 + TOKEN_TIMEOUT)
        await asyncio.wait({running})
        error = running.exception()
        assert isinstance(error, BaseExceptionGroup)
        assert [type(one) for one in error.exceptions] == [LeadershipLostError]


async def test_message_of_another_daemon_is_not_the_renewed_token(clock, broker):
    """It arrives while the leader waits for its own. Taken for that, it would end the token that the leader holds."""
    released = asyncio.Event()
    queue = PoolNames(POOL).leader_queue

    async def hold_token(command):
        if command == ("publish", queue, False):
            await released.wait()

    async with leading_token(broker, clock) as token:
        [held] = broker.bodies(queue)
        broker.hook = hold_token
        await clock.advance(RENEW_EVERY + 0.1)
        broker.hook = None
        foreign = Token(0, "elsewhere").to_message(token.user)
        await FakeChannel(broker).publish(foreign, exchange="", routing_key=queue)
        await clock.settle()
        assert broker.bodies(queue) == [held], "the foreign one is dropped"
        released.set()
        await clock.settle()
        [renewed] = broker.bodies(queue)
        assert renewed not in {held, foreign.body}

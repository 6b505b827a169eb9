"""The leader token on a real RabbitMQ (lifecycle: "Leadership")."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from broker_api import until
from pydantic import SecretStr

from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import Channel, Message
from osrdyne.amqp import connect as amqp_connect
from osrdyne.amqp.transport import CoalescingTransport
from osrdyne.broker.leadership.token import Token
from osrdyne.broker.session import LeaderSession
from osrdyne.config.models import PoolSettings, Settings
from osrdyne.errors import BrokerError, BrokerUnavailableError, LeadershipLostError
from osrdyne.protocol.uri import with_user

SOON = 120.0


@pytest.fixture
def settings(broker_settings, pool_id):
    return Settings(pool=PoolSettings(id=pool_id), broker=broker_settings)


class StandingClock(SystemClock):
    """Its time stands still until the test moves it; sleeping is real."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def session_of(settings: Settings, **more: Any) -> LeaderSession:
    return LeaderSession(settings, clock=SystemClock(), **more)


@pytest.fixture(autouse=True)
def short_silence(monkeypatch):
    """Where RabbitMQ attaches consumers by itself, an earlier leader is outwaited for three heartbeats, too."""
    monkeypatch.setattr("osrdyne.broker.leadership.token.SILENCE_WHERE_REATTACHED", 0.0)


def quick(settings: Settings) -> Settings:
    """An earlier leader is outwaited for three heartbeats."""
    return settings.model_copy(update={"broker": settings.broker.model_copy(update={"leader_heartbeat": 1.0})})


def term_of(term: int | None) -> Callable[[], Awaitable[int | None]]:
    async def last_term() -> int | None:
        return term

    return last_term


async def delete_leader_queue(session: LeaderSession) -> None:
    """As a person does it: over a connection that has nothing to do with a leader."""
    await (await session.publishing.channel()).delete_queue(session.names.leader_queue)


async def take_the_token(session: LeaderSession) -> None:
    """There is none afterwards."""
    channel = await session.control.channel()
    consumer = await channel.consume(session.names.leader_queue)
    await (await consumer.get()).ack()
    await channel.cancel(consumer)


@asynccontextmanager
async def kept(session: LeaderSession, token: Token) -> AsyncIterator[asyncio.Task[None]]:
    """The session at work."""
    keeping = asyncio.create_task(session.run(token))
    yield keeping
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)  # an error that is never retrieved would be logged much later


def reasons(task: asyncio.Task[None]) -> list[BaseException]:
    """The leaves of the group of errors that a session ended with."""
    found: list[BaseException] = []
    left = [task.exception()]
    while left:
        error = left.pop()
        if isinstance(error, BaseExceptionGroup):
            left += error.exceptions
        else:
            found.append(error)
    return found


async def tokens(session: LeaderSession, channel: Channel) -> int:
    """How many tokens there are, held or not, once all are free."""
    await session.close()
    info = await channel.declare_queue(session.names.leader_queue, passive=True)
    while info.consumers:
        await asyncio.sleep(0.02)
        info = await channel.declare_queue(session.names.leader_queue, passive=True)
    return info.ready


class TestAcquire:
    @pytest.mark.proves("controller/several-daemons-run-one")
    async def test_one_of_several_leads(self, settings):
        """lifecycle: token-queue, one-leader."""
        sessions = [session_of(settings) for _ in range(4)]
        for session in sessions:
            await session.__aenter__()
        waiting = {asyncio.create_task(session.token.acquire()): session for session in sessions}
        leaders = []
        async with asyncio.timeout(SOON):
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert len(done) == 1
                (task,) = done
                leaders.append(task.result()[1].term)
                await waiting.pop(task).close()
        assert leaders == [1, 2, 3, 4]

    async def test_several_tokens_become_one_with_the_highest_number(self, settings, channel):
        """lifecycle: token-queue: several are harmless, none is not."""
        async with session_of(settings) as session:
            for token in (Token(7, "x"), Token(3, "y"), Token(0, "")):
                message = token.to_message(session.token.user)
                await channel.publish(message, exchange="", routing_key=session.names.leader_queue)
            previous, own = await session.token.acquire()
            assert (previous, own.term) == (Token(7, "x"), 8)
            assert await tokens(session, channel) == 1

    async def test_what_is_no_token_of_ours_is_replaced(self, settings, channel):
        """A reply address may be any queue, so anybody may have an answer put here; no answer can carry a user. A term
        ahead of the clock is not believed of our own user either."""
        junk = [b"", b"{}", b"[]", b'{"term": "x"}', b'{"term": Infinity}', b"\xff", b"[" * 20_000]
        enormous = [10**400, 2**60, 2**53, int(time.time()) + 400 * 86_400]
        async with session_of(settings) as session:
            assert session.token.user is not None
            forged = [Message(body=body) for body in junk] + [Token(500, "elsewhere").to_message()]
            for user in (None, session.token.user):
                forged += [Message(b'{"term": %d, "host": "elsewhere"}' % term, user_id=user) for term in enormous]
            for message in forged:
                await channel.publish(message, exchange="", routing_key=session.names.leader_queue)
            previous, own = await session.token.acquire()
            assert (previous, own.term) == (Token(0, ""), 1)
            assert await tokens(session, channel) == 1

    async def test_user_that_rabbitmq_knows_by_another_name_leads_without_naming_it(self, settings, broker_settings):
        """As with OAuth 2: the name in the URI is not that of the user. A message that named it would be refused."""
        uri = with_user(settings.broker.effective_uri(), "another name", "secret")
        named = settings.model_copy(update={"broker": broker_settings.model_copy(update={"uri": SecretStr(uri)})})

        async def connect(options):
            return await amqp_connect(replace(options, uri=settings.broker.effective_uri()))

        terms = []
        for _ in range(2):
            async with LeaderSession(named, clock=SystemClock(), connect=connect) as session:
                assert session.token.user is None
                terms.append((await session.token.acquire())[1].term)
        assert terms == [1, 2]

    @pytest.mark.proves("controller/leader-queue-holds-something")
    async def test_junk_in_the_leader_queue_of_a_leader_is_dropped(self, settings, channel):
        forged: list[None] = []
        async with session_of(settings, on_forged=lambda: forged.append(None)) as leader:
            _, own = await leader.token.acquire()
            async with kept(leader, own) as keeping:
                for _ in range(50):
                    await channel.publish(Message(b"junk"), exchange="", routing_key=leader.names.leader_queue)
                await until(lambda: len(forged) >= 50)
                await leader.token.confirm()
                assert not keeping.done()
            assert await tokens(leader, channel) == 1

    @pytest.mark.proves("controller/leader-queue-deleted")
    async def test_deleted_leader_queue_does_not_restart_the_terms(self, settings):
        """The term that was announced may still be in use, or a later one."""
        began = int(time.time())
        for announced in (7, began + 1000):
            async with session_of(quick(settings), last_term=term_of(announced)) as session:
                _, own = await session.token.acquire()
                assert own.term > max(announced, began)
                await delete_leader_queue(session)

    @pytest.mark.proves("controller/leader-queue-purged-daemon")
    async def test_missing_token_is_replaced_by_a_standby(self, settings, monkeypatch):
        """The leader queue was purged while there was no leader."""
        monkeypatch.setattr("osrdyne.broker.leadership.token.TOKEN_INTERVAL", 0.5)
        async with session_of(settings) as session:
            await take_the_token(session)
            _, own = await asyncio.wait_for(session.token.acquire(), SOON)
            assert own.term == 1

    async def test_token_that_was_refused_is_left_as_it_was(self, settings):
        def refuse(previous):
            raise LeadershipLostError(f"not after {previous.term}")

        async with session_of(settings) as session:
            with pytest.raises(LeadershipLostError, match="not after 0"):
                await session.token.acquire(accept=refuse)
        async with session_of(settings) as session:
            previous, _ = await session.token.acquire()
            assert previous.term == 0


class TestKeep:
    async def test_renewal_keeps_the_token_and_there_is_never_none(self, settings, channel):
        """lifecycle: token-renewal."""
        async with session_of(settings) as leader, session_of(settings) as standby:
            _, own = await leader.token.acquire()
            waiting = asyncio.create_task(standby.token.acquire())
            keeping = asyncio.create_task(leader.token.run(own, renew_interval=0.02))
            await asyncio.sleep(2.0)
            assert (keeping.done(), waiting.done()) == (False, False)
            await leader.close()
            previous, next_token = await asyncio.wait_for(waiting, SOON)
            assert (previous.term, next_token.term) == (own.term, own.term + 1)
            await asyncio.wait({keeping})
            assert await tokens(standby, channel) == 1

    async def test_error_on_t_deposes_the_leader_and_fails_the_commands_that_wait(self, settings):
        """lifecycle: token-channel-fences, term-ends-whole: binding to a queue that does not exist closes T."""
        async with session_of(settings) as leader, session_of(settings) as standby:
            _, own = await leader.token.acquire()
            waiting = asyncio.create_task(standby.token.acquire())
            async with kept(leader, own) as keeping:
                commands = [
                    asyncio.create_task(leader.token.do(lambda t: t.bind_queue("nothing", "amq.direct", "k")))
                    for _ in range(5)
                ]
                done, _ = await asyncio.wait(commands, timeout=SOON)
                # The command that RabbitMQ refused may fail as such (`CommandRefusedError`, a subclass).
                assert [isinstance(task.exception(), LeadershipLostError) for task in done] == [True] * 5
                await asyncio.wait({keeping}, timeout=SOON)
                assert all(isinstance(error, BrokerError) for error in reasons(keeping))
                assert any(isinstance(error, LeadershipLostError) for error in reasons(keeping))
            _, next_token = await asyncio.wait_for(waiting, SOON)
            assert next_token.term == own.term + 1

    @pytest.mark.proves("controller/leader-disconnected-hangs")
    async def test_commands_of_a_deposed_leader_fail_and_do_nothing(self, settings, channel):
        """lifecycle: token-channel-fences [otherch]: its delete must not land after the next leader has bound the
        queue."""
        queue = f"{settings.pool.id}-req-a"
        await channel.declare_queue(queue)
        async with session_of(settings) as leader:
            _, own = await leader.token.acquire()
            async with kept(leader, own) as keeping:
                await leader.control.close()
                await asyncio.wait({keeping}, timeout=SOON)
            for attempt in (leader.token.do(lambda t: t.delete_queue(queue)), leader.token.confirm()):
                with pytest.raises(LeadershipLostError):
                    await asyncio.wait_for(attempt, SOON)
        await channel.declare_queue(queue, passive=True)

    @pytest.mark.proves("controller/leader-queue-deleted")
    async def test_deleted_leader_queue_ends_the_connection_of_the_leader_at_once(self, settings):
        """The channel stays open, and would still carry out commands beside those of the next leader."""
        async with session_of(settings) as leader:
            _, own = await leader.token.acquire()
            async with kept(leader, own) as keeping:
                await delete_leader_queue(leader)
                await asyncio.wait({keeping}, timeout=SOON)
                assert keeping.done()
                await asyncio.wait_for(leader.control.wait_closed(), SOON)
                assert any(isinstance(error, LeadershipLostError) for error in reasons(keeping))
                with pytest.raises(LeadershipLostError):
                    await leader.token.do(lambda t: t.ping())

    @pytest.mark.proves("controller/leader-queue-deleted")
    async def test_next_leader_waits_for_a_hanging_leader_after_the_queue_was_deleted(self, settings):
        """As one does that stands still: RabbitMQ carries out what it sends, until its connection is closed.

        Until then RabbitMQ 3.10 may also hold the consumer of the earlier leader for one of the new queue.
        """
        async with session_of(settings) as earlier, session_of(quick(settings), last_term=term_of(1)) as later:
            await earlier.token.acquire()  # nothing reads its consumer any more
            await delete_leader_queue(later)
            await later._ensure_token()
            began = time.monotonic()
            acquiring = asyncio.create_task(later.token.acquire())
            await asyncio.sleep(1.5)  # half of three heartbeats
            assert not acquiring.done()
            await earlier.control.close()
            _, own = await asyncio.wait_for(acquiring, SOON)
            assert own.term > 1_000_000_000
            assert time.monotonic() - began >= 3.0

    @pytest.mark.proves("controller/rabbitmq-4-0-attaches")
    async def test_standby_that_rabbitmq_attached_to_a_new_leader_queue_gets_the_token(self, settings, monkeypatch):
        """broker: reattached-consumers: RabbitMQ 3.10 counts it as the active consumer, and delivers nothing to it.

        What its channel has to do before it sees the end of the queue makes that certain.
        """
        monkeypatch.setattr("osrdyne.broker.leadership.token.CONSUME_AGAIN_AFTER", 3.0)
        monkeypatch.setattr("osrdyne.broker.leadership.token.TOKEN_INTERVAL", 3.0)
        busy = f"{settings.pool.id}-busy"
        async with session_of(settings) as standby, session_of(settings) as other:
            administrator = await other.publishing.channel()
            await administrator.declare_queue(busy)
            await take_the_token(other)
            acquiring = asyncio.create_task(standby.token.acquire())
            while not (await administrator.declare_queue(standby.names.leader_queue, passive=True)).consumers:
                await asyncio.sleep(0.02)
            for number in range(500):
                await standby.token._channel.begin_bind_queue(busy, "amq.direct", str(number))
            await administrator.delete_queue(standby.names.leader_queue)
            await other._ensure_token()
            try:
                _, own = await asyncio.wait_for(acquiring, SOON)
            except BrokerUnavailableError:  # RabbitMQ cancelled the consumer, so that the daemon begins anew
                return
            assert own.term == 1

    @pytest.mark.proves("controller/rabbitmq-4-0-attaches")
    async def test_leader_whose_token_does_not_come_back_ends_its_term(self, settings, monkeypatch):
        """broker: reattached-consumers: no cancel shows that its queue was deleted, and another daemon may lead."""
        monkeypatch.setattr("osrdyne.broker.leadership.token.TOKEN_TIMEOUT", 1.0)
        async with session_of(settings) as leader:
            _, own = await leader.token.acquire()
            assert leader.token._consumer is not None
            monkeypatch.setattr(leader.token._consumer, "put", lambda _: None)
            keeping = asyncio.create_task(leader.token.run(own, renew_interval=0.1))
            await asyncio.wait({keeping}, timeout=SOON)
            [reason] = reasons(keeping)
            assert isinstance(reason, LeadershipLostError)
            assert "did not come back" in str(reason)

    async def test_lost_publishing_connection_or_channel_ends_the_session(self, settings):
        """lifecycle: token-channel-never-fails: all connections of a leader close together.

        A publish that RabbitMQ cannot accept closes the channel; without it nothing would ever be forwarded.
        """
        for what in ("connection", "channel"):
            async with session_of(settings) as leader:
                _, own = await leader.token.acquire()
                async with kept(leader, own) as keeping:
                    if what == "connection":
                        await leader.publishing.close()
                    else:
                        with pytest.raises(BrokerError):
                            await leader.publisher.publish(Message(), exchange="no-such-exchange", routing_key="k")
                    done, _ = await asyncio.wait({keeping}, timeout=SOON)
                    assert keeping in done

    @pytest.mark.proves("controller/many-large-requests-keys")
    async def test_large_requests_do_not_delay_the_token_channel(self, settings, channel, monkeypatch):
        """Bodies that are not read yet fill the buffers of their connection; heartbeats and answers are behind them."""
        sockets: dict[str, asyncio.ReadTransport] = {}

        class Recorded(CoalescingTransport):
            async def create(self, url, **kwargs):
                reader, writer = await super().create(url, **kwargs)
                sockets[url.query["name"].split()[2]] = writer.transport
                return reader, writer

        monkeypatch.setattr("osrdyne.amqp.connection.CoalescingTransport", Recorded)
        queue = f"{settings.pool.id}-large"
        await channel.declare_queue(queue, arguments={"x-queue-type": "quorum"})
        async with session_of(settings) as session:
            _, own = await session.token.acquire()
            async with kept(session, own):
                consumer = await (await session.channel()).consume(queue)
                sockets["consumer"].pause_reading()
                for _ in range(32):
                    await channel.publish(Message(body=bytes(2**20)), exchange="", routing_key=queue)
                async with asyncio.timeout(SOON):
                    await session.token.do(lambda token: token.ping())
                taken = consumer.waiting()
                sockets["consumer"].resume_reading()
                async with asyncio.timeout(SOON):
                    bodies = [len((await consumer.get()).body) for _ in range(32)]
        assert taken < 32
        assert bodies == 32 * [2**20]

    @pytest.mark.proves("controller/leader-disconnected-hangs")
    async def test_confirm_asks_the_broker_once_the_lease_is_over(self, settings):
        """lifecycle: lease, pooled-late-process: and once after a given moment."""
        clock = StandingClock()
        async with LeaderSession(settings, clock=clock) as leader:

            async def asks(passed, **since):
                clock.now += passed
                await leader.token.confirm(**since)
                return leader.token._led_at == clock.now

            _, own = await leader.token.acquire()
            async with kept(leader, own):
                assert await asks(settings.broker.leader_heartbeat / 2 + 0.1)
                assert not await asks(0.1)
                seen_at = clock.now
                assert await asks(0.1, since=seen_at)
                assert not await asks(0.1, since=seen_at)

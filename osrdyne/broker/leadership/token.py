"""The leader token: one message in a single-active-consumer queue. The daemon that holds it unacknowledged leads.

`TokenChannel` owns the channel T that consumes the token, and only over T request queues are bound, unbound and
deleted: the end of T ends the right to do so (lifecycle: "Leadership"). One task sends all commands over T, in order,
and only commands that should not fail; any error on T ends the term. Commands that wait together and need no result
share an answer: RabbitMQ executes the commands of a channel in order, so the answer to the last one covers all.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.amqp import Channel, Consumer, Delivery, Message
from osrdyne.amqp.confirm_timeout import ConfirmTimeout
from osrdyne.amqp.errors import describe_end
from osrdyne.errors import (
    BrokerUnavailableError,
    CommandRefusedError,
    LeadershipLostError,
    ManagementUnavailableError,
    OsrdyneError,
)
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.control import MAX_TERM, is_plausible_term
from osrdyne.protocol.names import PoolNames

T = TypeVar("T")
Publish = Callable[[Message], Awaitable[None]]
# Returns the term that was last announced outside the leader queue; None if there was none.
LastTerm = Callable[[], Awaitable[int | None]]
TOKEN_INTERVAL = 15.0  # Seconds after which a standby publishes a token, in case there is none.
CONSUME_AGAIN_AFTER = 60.0  # Seconds after which a standby consumes the leader queue again, over another channel.
TOKEN_TIMEOUT = 15.0  # Seconds within which RabbitMQ must deliver a token that the leader publishes.
RENEW_EVERY = 300.0  # Seconds between two renewals of the token at most.
# The same for a RabbitMQ that attaches consumers to another queue of the same name, so that no cancel shows that the
# leader queue was deleted (broker: reattached-consumers).
RENEW_EVERY_WHERE_REATTACHED = 5.0
# Seconds within which an earlier leader notices there that its leader queue was deleted, and closes its connection.
SILENCE_WHERE_REATTACHED = RENEW_EVERY_WHERE_REATTACHED + TOKEN_TIMEOUT + 5.0
LOG_INTERVAL = 60.0  # Seconds between two log lines about messages in the leader queue that are not tokens.
Send = Callable[[Channel], Awaitable[Any]]
MAX_SHARED = 32  # How many commands share an answer at most.


@dataclass(frozen=True, slots=True)
class _Command:
    """`send` waits for the answer. `begin` does not; None if the caller needs the result."""

    send: Send
    begin: Send | None
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Token:
    """The content of the token: the number of the term, the host of the leader, and the number of renewals."""

    term: int
    host: str
    serial: int = 0

    def to_message(self, user: str | None = None) -> Message:
        """`user`: the user of the publishing connection, which RabbitMQ verifies."""
        body = json.dumps({"term": self.term, "host": self.host, "serial": self.serial}).encode()
        return Message(body=body, user_id=user)

    @classmethod
    def parse(cls, body: bytes) -> Token | None:
        """Parse a token; None for anything else, and for a term that no leader can have."""
        try:
            decoded = json.loads(body)
            term, host = decoded["term"], decoded.get("host", "")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        # Bounded: no later leader could have a higher term than the largest possible one.
        if not isinstance(term, int) or isinstance(term, bool) or not 0 <= term <= MAX_TERM:
            return None
        # The serial is not read: it only distinguishes tokens of one term in the queue.
        return cls(term, str(host))


@dataclass(frozen=True, slots=True)
class TokenPublisher:
    """How tokens are published, over another connection than T. `is_blocked`: whether an alarm blocks that connection.
    `user`: its user, as verified by RabbitMQ; None if tokens carry no user."""

    publish: Publish
    is_blocked: Callable[[], bool]
    user: str | None


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times in seconds. `lease`: for how long after it was sent an answered command proves the lead. `renew_every`:
    between two renewals of the token. `silence`: within which an earlier leader notices that its token is missing."""

    lease: float
    renew_every: float
    silence: float

    @classmethod
    def of(cls, *, heartbeat: float, reattaches: bool) -> TokenTimes:
        """`reattaches`: whether RabbitMQ may attach a consumer to a queue of the same name
        (`BrokerVersion.reattaches_consumers`)."""
        if reattaches:
            silence = max(3 * heartbeat, SILENCE_WHERE_REATTACHED)
            return cls(heartbeat / 2, RENEW_EVERY_WHERE_REATTACHED, silence)
        return cls(heartbeat / 2, RENEW_EVERY, 3 * heartbeat)


class TokenChannel:
    """The channel T of a standby or leader.

    Any client could have a reply put into the leader queue. So a message counts as a token only if RabbitMQ has
    verified that the daemon's own user published it, and if its term is not far ahead of the clock. Other messages make
    a standby the leader as well, because the active consumer leads, but they do not determine the term.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        names: PoolNames,
        host: str,
        publisher: TokenPublisher,
        times: TokenTimes,
        reopen: Callable[[], Awaitable[Channel]],
        last_term: LastTerm | None = None,
        on_forged: Callable[[], None] | None = None,
        clock: Clock,
    ) -> None:
        """`reopen` opens a channel that replaces `channel` while this daemon waits for the token."""
        self._channel = channel
        self._reopen = reopen
        self._names = names
        self._host = host
        self._publish_token, self._is_blocked, self.user = publisher.publish, publisher.is_blocked, publisher.user
        self._times = times
        self.term = 0  # The number of the term, once the token is held.
        self._last_term = last_term
        self._on_forged = on_forged
        self._clock = clock
        self._consumer: Consumer | None = None
        self._held: list[Delivery] = []
        self._awaited: tuple[bytes, asyncio.Future[Delivery]] | None = None
        self._commands: deque[_Command] = deque()
        self._new_command = Wakeup(clock)
        self._pending: set[asyncio.Future[Any]] = set()
        self._lost = False
        # When the latest command or token was sent that RabbitMQ has answered over T: at that time this daemon led. The
        # time of the answer proves nothing, because a process that was stopped meanwhile reads it late.
        self._led_at = -math.inf
        self._forged_logged_at = -math.inf
        self._forged = 0
        self._log: Logger = get_logger("leader", pool=names.pool)

    @property
    def renew_every(self) -> float:
        """Seconds between two renewals of the token at most."""
        return self._times.renew_every

    async def acquire(self, *, accept: Callable[[Token], None] | None = None) -> tuple[Token, Token]:
        """Wait until this channel is the active consumer and holds the token; return the previous and the own token.

        `accept` may refuse the previous token by raising; then nothing has changed. The daemon takes all tokens,
        publishes one with the next term, and acknowledges the others after the confirm, so that the queue is never
        without a token (lifecycle: token-queue).
        """
        # From the first delivery on, this consumer is active: RabbitMQ delivers no token to another daemon until this
        # channel ends.
        taken = [await self._wait_for_token()]
        assert self._consumer is not None
        # RabbitMQ delivers every token to the active consumer. Most have arrived when this is answered; a late one is
        # dropped by `_read`.
        await self._channel.declare_queue(self._names.leader_queue, passive=True)
        while self._consumer.waiting():
            taken.append(await self._consumer.get())
        # Read with the token held: before that an earlier leader may still announce its term.
        announced, is_known = await self._announced_term()
        # Terms grow by less than one a second: a term far ahead of clock and announcement is not from a leader.
        limit = max(announced or 0, math.floor(self._clock.time()))
        found = [token for delivery in taken if (token := self._believed(delivery, limit)) is not None]
        previous = max(found, key=lambda token: token.term, default=Token(0, ""))
        if accept is not None:
            # Before anything is published or acknowledged: a refusal leaves the queue as it was for the next daemon.
            accept(previous)
        # The queue is new: its active consumer may not be the only leader.
        if previous.term == 0 and not is_known:
            announced = limit  # if an earlier leader has announced a term, the clock is ahead of it
        if previous.term == 0 and announced is not None:
            await self._outwait_earlier_leader()
        own = Token(1 + _last_used(previous.term, announced, now=self._clock.time()), self._host)
        # Crash from here to the acknowledgements: RabbitMQ returns every token, and the next leader takes a higher
        # number.
        self._held = taken
        await self._publish_first(own)
        # After the confirm: a term that never began must not use the names of queues that contain its number.
        self.term = own.term
        return previous, own

    async def _announced_term(self) -> tuple[int | None, bool]:
        """The term that was announced last, and whether RabbitMQ has answered."""
        try:
            return (None if self._last_term is None else await self._last_term()), True
        except ManagementUnavailableError as error:
            self._log.warning("announced term unknown", error=str(error))
            return None, False

    async def _wait_for_token(self) -> Delivery:
        """Consume the leader queue until a message comes, from time to time over another channel.

        RabbitMQ may have attached the consumer to a new leader queue, where it is the active consumer and gets no
        deliveries (broker: reattached-consumers).
        """
        while True:
            # Without a prefetch limit: the leader must get its renewed token while it holds the old one.
            self._consumer = await self._channel.consume(self._names.leader_queue)
            delivery = await self._first_message(self._consumer)
            if delivery is not None:
                return delivery
            # Before the next one consumes: of two consumers of one daemon, the unused one could be the active one.
            await self._channel.close()
            self._channel = await self._reopen()

    async def _first_message(self, consumer: Consumer) -> Delivery | None:
        """Return the first message of the leader queue; None if none arrives for `CONSUME_AGAIN_AFTER` seconds.

        The token may be missing although no daemon leads: the queue was purged, or deleted and declared again. So a
        standby publishes another one from time to time; a leader drops it.
        """
        arrival = asyncio.ensure_future(consumer.get())
        until = self._clock.monotonic() + CONSUME_AGAIN_AFTER
        try:
            while not arrival.done():
                if await self._is_done_in(arrival, TOKEN_INTERVAL):
                    break
                if self._clock.monotonic() >= until:
                    return None
                await self._publish_token(Token(0, "").to_message(self.user))
            return await arrival
        finally:
            # A pending read would take the token from the next reader of the consumer.
            arrival.cancel()

    async def _is_done_in(self, future: asyncio.Future[Any], seconds: float) -> bool:
        pause: asyncio.Future[Any] = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({future, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
        return future.done()

    @contextmanager
    def _within_limit(self) -> Iterator[None]:
        """Publish a token inside and wait for its delivery. Raises `LeadershipLostError` if it does not come back in
        time although RabbitMQ accepts publishes: then the consumer is not that of the present leader queue, and another
        daemon may lead."""
        try:
            with ConfirmTimeout(TOKEN_TIMEOUT, self._is_blocked, call_later=self._clock.call_later):
                yield
        except TimeoutError as error:
            raise LeadershipLostError(f"The leader token did not come back within {TOKEN_TIMEOUT:g} s.") from error

    def _believed(self, delivery: Delivery, limit: int) -> Token | None:
        """Parse the token of a delivery; None for anything else. `limit`: the time or term that leaders may have
        reached by now."""
        token = Token.parse(delivery.body)
        # RabbitMQ refuses a message whose `user-id` is not the user of its connection, so a matching one is proven.
        if token is None or (self.user is not None and delivery.properties.user_id != self.user):
            return None
        return token if is_plausible_term(token.term, now=limit) else None

    async def _outwait_earlier_leader(self) -> None:
        """Wait until an earlier leader, whose token is gone because the leader queue was deleted or purged, cannot act.

        Within this time that leader notices the loss, or RabbitMQ closes the connection of a leader that hangs.
        """
        assert self._consumer is not None
        self._log.warning("leader token missing: waiting for an earlier leader to end", seconds=self._times.silence)
        # No command is sent meanwhile: two leaders are never allowed (lifecycle: one-leader).
        await self._clock.sleep(self._times.silence)
        # Another daemon may have got the token meanwhile.
        if self._consumer.ended or self._channel.is_closed:
            raise LeadershipLostError(
                "The leader token was lost while this daemon waited for an earlier leader to end."
            )

    async def _publish_first(self, token: Token) -> None:
        """Publish the token of this term, wait until T holds it, and then acknowledge every other message."""
        old, sent_at = self._held, self._clock.monotonic()
        with self._within_limit():
            delivery = await self._publish_and_read(token, others=old)
        await self._hold(delivery, instead_of=old, sent_at=sent_at)

    async def _publish_and_read(self, token: Token, *, others: list[Delivery]) -> Delivery:
        """Publish a token and read the leader queue until it comes; add earlier deliveries to `others`."""
        assert self._consumer is not None
        message = token.to_message(self.user)
        # Over the publishing connection, because on 3.10 a publish can close its connection (lifecycle:
        # token-channel-never-fails).
        await self._publish_token(message)
        while not self._is_message(delivery := await self._consumer.get(), message.body):
            others.append(delivery)
        return delivery

    def _is_message(self, delivery: Delivery, body: bytes) -> bool:
        return delivery.body == body and (self.user is None or delivery.properties.user_id == self.user)

    async def _hold(self, delivery: Delivery, *, instead_of: list[Delivery], sent_at: float) -> None:
        self._held = [delivery]
        self._led_at = sent_at
        # The new token is held by now (lifecycle: token-queue). Crash within this loop: RabbitMQ returns the rest, and
        # the next leader takes all tokens and drops the surplus.
        for stale in instead_of:
            await self._drop(stale)

    async def _drop(self, delivery: Delivery) -> None:
        """Acknowledge a message that is not the token of this term."""
        if self._believed(delivery, MAX_TERM) is None:
            self._count_forged(len(delivery.body))
        await delivery.ack()

    def _count_forged(self, size_bytes: int) -> None:
        if self._on_forged is not None:
            self._on_forged()
        self._forged += 1
        now = self._clock.monotonic()
        if now - self._forged_logged_at >= LOG_INTERVAL:
            self._forged_logged_at = now
            self._log.warning(
                "message in the leader queue is not a token", messages=self._forged, size_bytes=size_bytes
            )
            self._forged = 0

    async def run(self, token: Token, *, renew_interval: float) -> None:
        """Serve the channel for the term: send commands, renew the token.

        Ends only with a `BrokerError`; every command that waits then, or comes later, fails.
        """
        assert self._consumer is not None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="token channel closed")
                group.create_task(self._read(), name="leader queue")
                group.create_task(self._renew(token, renew_interval), name="token renewal")
                group.create_task(self._serve(), name="token channel commands")
        finally:
            # First: `do` accepts no further command.
            self._lost = True
            for answer in list(self._pending):
                self._fail(answer, LeadershipLostError("The leader token is lost."))

    async def _watch(self) -> None:
        reason = await self._channel.wait_closed()
        raise LeadershipLostError(f"The channel of the leader token was closed: {describe_end(reason)}.")

    async def _read(self) -> None:
        """Read the leader queue: pass the renewed token on, drop all other messages.

        RabbitMQ cancels the consumer when the queue is deleted. T stays open then and would still execute commands
        while a new leader queue makes another daemon the leader, so the term ends at once.
        """
        assert self._consumer is not None
        while True:
            try:
                delivery = await self._consumer.get()
            except BrokerUnavailableError as error:
                raise LeadershipLostError(f"The leader token is lost: {error}") from error
            # Compared by content: a token that another daemon publishes must not count as the renewed one.
            awaited = self._awaited
            if awaited is not None and self._is_message(delivery, awaited[0]):
                self._awaited = None
                if not awaited[1].done():  # cancelled when the token did not come in time: the term is ending
                    awaited[1].set_result(delivery)
            else:
                await self._drop(delivery)

    async def _renew(self, token: Token, interval: float) -> None:
        """Replace the token before the broker's consumer timeout takes it away (lifecycle: token-renewal)."""
        while True:
            await self._clock.sleep(interval)
            # The serial distinguishes the new message from the one that is held. The term stays: it numbers leaders
            # (lifecycle: generations).
            token, sent_at = replace(token, serial=token.serial + 1), self._clock.monotonic()
            with self._within_limit():
                delivery = await self._publish_and_await(token)
            # Crash before the old one is acknowledged: two tokens, which is harmless.
            await self._hold(delivery, instead_of=self._held, sent_at=sent_at)
            self._log.debug("leader token renewed", term=token.term)

    async def _publish_and_await(self, token: Token) -> Delivery:
        """Publish a token and wait until `_read` receives it."""
        message = token.to_message(self.user)
        arrival: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        # Before the publish: the token may come back before its confirm does.
        self._awaited = (message.body, arrival)
        await self._publish_token(message)
        return await arrival

    async def _serve(self) -> None:
        while True:
            while self._commands:
                await self._carry_out(self._next_commands())
            await self._new_command.wait()

    def _next_commands(self) -> list[_Command]:
        """Take the next command, with those directly behind it that can share its answer. The order stays."""
        batch = [self._commands.popleft()]
        while (
            self._commands
            and len(batch) < MAX_SHARED
            and batch[-1].begin is not None
            and self._commands[0].begin is not None
        ):
            batch.append(self._commands.popleft())
        return batch

    async def _carry_out(self, batch: list[_Command]) -> None:
        last, sent_at = batch[-1], self._clock.monotonic()
        if self._is_over:  # `_read` or `_watch` raises the reason
            for command in batch:
                self._fail(command.answer, LeadershipLostError("The leader token is lost."))
            return
        try:
            for command in batch[:-1]:
                if command.begin is not None:
                    await command.begin(self._channel)
            # Crash before the answer: the next leader gets the token only after RabbitMQ has executed the command or
            # dropped it.
            result = await last.send(self._channel)
        except OsrdyneError as error:
            kind = LeadershipLostError if isinstance(error, BrokerUnavailableError) else CommandRefusedError
            lost = kind(f"A command on the channel of the leader token failed: {error}")
            for command in batch:  # RabbitMQ does not say which of them it refused
                self._fail(command.answer, lost)
            # Any error on T ends the term, for all keys (lifecycle: term-ends-whole).
            raise lost from error
        self._led_at = sent_at
        for command in batch:
            if not command.answer.done():  # the caller was cancelled; the command was executed anyway
                command.answer.set_result(result if command is last else None)

    @property
    def _is_over(self) -> bool:
        """Whether this daemon may not act any more, even if RabbitMQ would still execute commands of the channel."""
        return self._lost or self._channel.is_closed or (self._consumer is not None and self._consumer.ended)

    @staticmethod
    def _fail(answer: asyncio.Future[Any], error: LeadershipLostError) -> None:
        if not answer.done():
            answer.set_exception(error)
            answer.exception()  # marks the exception as retrieved, also if the caller was cancelled

    async def do(self, command: Callable[[Channel], Awaitable[T]], *, begin: Send | None = None) -> T:
        """Send a command over T, in order, and return its result. It runs to its end even if the caller is cancelled.

        `begin`: the same command without an answer, if its result is not needed; `TokenChannel` may send it instead.
        Raises `LeadershipLostError` if it fails: then the term is over.
        """
        if self._is_over:
            raise LeadershipLostError("The leader token is lost.")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # Before it is queued: `run` fails all pending answers when the term ends, so that no caller waits without end.
        self._pending.add(answer)
        answer.add_done_callback(self._pending.discard)
        # `_serve` sends it, so that a cancelled caller leaves no command half done.
        self._commands.append(_Command(command, begin, answer))
        self._new_command.set()
        return await answer

    async def confirm(self, *, since: float | None = None) -> None:
        """Return if T has answered what was sent within the lease, else ping over T (lifecycle: lease).

        `since` (monotonic): T must have answered what was sent after it. A later leader gets the token after that
        answer, and so finds everything that this daemon knew at `since`.
        """
        lapsed = self._clock.monotonic() - self._led_at > self._times.lease
        if self._is_over or lapsed or (since is not None and self._led_at <= since):
            await self.do(lambda channel: channel.ping())


def _last_used(term: int, announced: int | None, *, now: float) -> int:
    """Return the highest term that may be in use: that of the last token or, without a token, one from the clock.

    An announced term shows that the pool was led before. A leader announces its term a moment after it has the token,
    so the announced term may be too low; but terms grow by less than one a second.
    """
    if announced is None:
        return term
    return max(term, announced) if term else max(announced, math.floor(now))

"""The leader token: one message in a single-active-consumer queue; who holds it unacknowledged leads.

`TokenChannel` owns the channel T that consumes the token, and is the only way to bind, unbind and delete
request queues: when T is gone, so is the right to act at the broker (lifecycle: "Leadership"). One task sends
everything over
T, in order; nothing that can fail is ever sent there. Any error on T ends the term. Commands that wait together and can
go without an answer share one: RabbitMQ carries out the commands of a channel in order, so the answer to the last of
them shows that all of them were carried out.
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
from osrdyne.errors import BrokerUnavailableError, CommandRefusedError, LeadershipLostError, OsrdyneError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.control import MAX_TERM, is_plausible_term
from osrdyne.protocol.names import PoolNames

T = TypeVar("T")
Publish = Callable[[Message], Awaitable[None]]
# The term that was last announced outside of the leader queue; None when there was none.
LastTerm = Callable[[], Awaitable[int | None]]
TOKEN_INTERVAL = 15.0  # Seconds after which a daemon that waits for the token publishes one, in case there is none.
# Seconds after which a daemon that waits for the token consumes the leader queue anew, over another channel.
CONSUME_AGAIN_AFTER = 60.0
TOKEN_TIMEOUT = 15.0  # Seconds within which a token that the leader publishes must come back to it.
RENEW_EVERY = 300.0
# Seconds between two renewals of the token at most. The short one is for a RabbitMQ that attaches consumers to a queue
# of the same name by itself, so that no cancel shows that the leader queue was deleted (broker: reattached-consumers).
RENEW_EVERY_WHERE_REATTACHED = 5.0
# Seconds after which an earlier leader has noticed there that its leader queue was deleted, and has closed its
# connection.
SILENCE_WHERE_REATTACHED = RENEW_EVERY_WHERE_REATTACHED + TOKEN_TIMEOUT + 5.0
LOG_INTERVAL = 60.0  # Seconds between two log lines about messages in the leader queue that are no token.
Send = Callable[[Channel], Awaitable[Any]]
MAX_SHARED = 32  # How many commands share an answer at most.


@dataclass(frozen=True, slots=True)
class _Command:
    """`send` waits for the answer. `begin` does not, where the answer holds nothing that is needed."""

    send: Send
    begin: Send | None
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Token:
    """The content of the token: the number of the term, the host that leads it, and how often it was renewed."""

    term: int
    host: str
    serial: int = 0

    def to_message(self, user: str | None = None) -> Message:
        """`user`: that of the connection it is published on, which RabbitMQ verifies."""
        body = json.dumps({"term": self.term, "host": self.host, "serial": self.serial}).encode()
        return Message(body=body, user_id=user)

    @classmethod
    def parse(cls, body: bytes) -> Token | None:
        """Read a token; None for anything else, and for a term that no leader can have."""
        try:
            decoded = json.loads(body)
            term, host = decoded["term"], decoded.get("host", "")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        # Bounded: a term that is too large would be a number that no later leader could exceed.
        if not isinstance(term, int) or isinstance(term, bool) or not 0 <= term <= MAX_TERM:
            return None
        # The serial is not read: it only tells two tokens of one term apart while they are in the queue.
        return cls(term, str(host))


@dataclass(frozen=True, slots=True)
class TokenPublisher:
    """How tokens are published: on another connection than T. `is_blocked`: whether RabbitMQ takes no publishes there
    (an alarm). `user`: that of the connection, as RabbitMQ has verified it; None if it knows another name."""

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
    """The channel T of a leader, from the moment it waits for the token.

    Which messages of the leader queue are tokens: any client could have an answer put there. So a token counts only
    when RabbitMQ has verified that our own user published it, and its term is not far ahead of the clock. Anything else
    gives the lead as well as a token does (the lead is to be the active consumer), but decides nothing about the term.
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
        """`reopen` opens a channel that takes the place of `channel`, as long as this daemon waits."""
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
        """Wait until this channel is the active consumer and holds the token; returns (previous, own) tokens.

        `accept` may refuse the previous token by raising; then nothing of it was changed.
        All tokens there are get taken, one with the next number is published and confirmed, and only then are the
        others acknowledged: there is never none (lifecycle: token-queue).
        """
        # The consumer is active from the first delivery on. RabbitMQ gives no other daemon a token until this channel
        # ends.
        taken = [await self._wait_for_token()]
        assert self._consumer is not None
        # The broker pushes every token to the active consumer: what is on its way has mostly arrived after this
        # question, and what is late is taken with the next renewal.
        await self._channel.declare_queue(self._names.leader_queue, passive=True)
        while self._consumer.waiting():
            taken.append(await self._consumer.get())
        # Read only now, with the token held: before that the earlier leader may still announce its term.
        announced = None if self._last_term is None else await self._last_term()
        # Terms grow by less than one a second: one far beyond clock and announcement was not made by a leader.
        limit = max(announced or 0, math.floor(self._clock.time()))
        found = [token for delivery in taken if (token := self._believed(delivery, limit)) is not None]
        previous = max(found, key=lambda token: token.term, default=Token(0, ""))
        if accept is not None:
            # Before anything is published or acknowledged: a refusal leaves the queue as it was for the next daemon.
            accept(previous)
        # The queue is new, so that being its active consumer does not prove that no other daemon leads.
        if previous.term == 0 and announced is not None:
            await self._outwait_earlier_leader()
        own = Token(1 + _last_used(previous.term, announced, now=self._clock.time()), self._host)
        # Crash from here to the acknowledgements: RabbitMQ returns every token, and the next leader takes a higher
        # number.
        self._held = taken
        await self._publish_first(own)
        # Only after the confirm: names of queues are made of the term, and must not be used by a term that never began.
        self.term = own.term
        return previous, own

    async def _wait_for_token(self) -> Delivery:
        """Consume the leader queue until a message comes.

        Over another channel from time to time: RabbitMQ may have attached the consumer to a new leader queue by itself,
        so that it is the active one there and gets nothing (broker: reattached-consumers).
        """
        while True:
            # Without a limit of the prefetch: the leader must get its renewed token while it holds the old one.
            self._consumer = await self._channel.consume(self._names.leader_queue)
            delivery = await self._first_message(self._consumer)
            if delivery is not None:
                return delivery
            await self._channel.close()
            # Closed before the next one consumes: two consumers of one daemon would stand in line behind each other.
            self._channel = await self._reopen()

    async def _first_message(self, consumer: Consumer) -> Delivery | None:
        """The first message of the leader queue that comes here; None when there was none for a while.

        The token may be missing although no daemon leads: the queue was purged, or deleted and declared again. So
        another one is published now and then; a leader drops it.
        """
        arrival = asyncio.ensure_future(consumer.get())
        until = self._clock.monotonic() + CONSUME_AGAIN_AFTER
        try:
            while not arrival.done():
                if await self._is_done_in(arrival, TOKEN_INTERVAL):
                    break
                if self._clock.monotonic() >= until:
                    return None
                # Harmless where a token exists: the active consumer takes and drops it.
                await self._publish_token(Token(0, "").to_message(self.user))
            return await arrival
        finally:
            # A pending read of the consumer would take the token that the next reader waits for.
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
        """Publish a token inside and wait for it. Raises `LeadershipLostError` when it does not come back, although
        RabbitMQ takes publishes: then the consumer is not that of the present leader queue, and another daemon may
        lead."""
        try:
            with ConfirmTimeout(TOKEN_TIMEOUT, self._is_blocked, call_later=self._clock.call_later):
                yield
        except TimeoutError as error:
            raise LeadershipLostError(f"The leader token did not come back within {TOKEN_TIMEOUT:g} s.") from error

    def _believed(self, delivery: Delivery, limit: int) -> Token | None:
        """The token of a delivery; None for anything else. `limit`: a term that may have been reached by now."""
        token = Token.parse(delivery.body)
        # RabbitMQ refuses a message that names another user than its connection's; so a matching name is proven.
        if token is None or (self.user is not None and delivery.properties.user_id != self.user):
            return None
        return token if is_plausible_term(token.term, now=limit) else None

    async def _outwait_earlier_leader(self) -> None:
        """The pool was led before, and its last token is gone: the leader queue was deleted, or purged.

        By then RabbitMQ has notified the earlier leader, if there is one, or has closed its connection if that leader
        does not read. Until then it may still act.
        """
        assert self._consumer is not None
        self._log.warning("leader token missing: waiting for an earlier leader to end", seconds=self._times.silence)
        # No command is sent meanwhile: two leaders at the same time are never allowed (lifecycle: one-leader).
        await self._clock.sleep(self._times.silence)
        # The wait was long enough for another daemon to get the token: this one must not go on as if it still led.
        if self._consumer.ended or self._channel.is_closed:
            raise LeadershipLostError(
                "The leader token was lost while this daemon waited for an earlier leader to end."
            )

    async def _publish_first(self, token: Token) -> None:
        """Publish the token of this term, wait until we hold it, and only then acknowledge every other message."""
        old, sent_at = self._held, self._clock.monotonic()
        with self._within_limit():
            delivery = await self._publish_and_read(token, others=old)
        await self._hold(delivery, instead_of=old, sent_at=sent_at)

    async def _publish_and_read(self, token: Token, *, others: list[Delivery]) -> Delivery:
        """Publish a token and read the leader queue until it comes; what comes before goes to `others`."""
        assert self._consumer is not None
        message = token.to_message(self.user)
        # Over the publishing connection: on 3.10 a publish can end its connection (lifecycle:
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
        # The new token is held by now: there is never none (lifecycle: token-queue).
        # Crash within this loop: RabbitMQ returns what is left, and the next leader takes all tokens and drops the
        # surplus.
        for stale in instead_of:
            await self._drop(stale)

    async def _drop(self, delivery: Delivery) -> None:
        """Acknowledge what is not the token of this term."""
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
        """Own the channel for the term: carry out commands, renew the token.

        Ends only by raising a `BrokerError`; every command that waits then, or comes later, fails.
        """
        assert self._consumer is not None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="token channel closed")
                group.create_task(self._read(), name="leader queue")
                group.create_task(self._renew(token, renew_interval), name="token renewal")
                group.create_task(self._serve(), name="token channel commands")
        finally:
            # First of all: `do` accepts no command any more, while those that wait are failed.
            self._lost = True
            for answer in list(self._pending):
                self._fail(answer, LeadershipLostError("The leader token is lost."))

    async def _watch(self) -> None:
        reason = await self._channel.wait_closed()
        words = "by ourselves" if reason is None else str(reason) or "the connection was lost"
        raise LeadershipLostError(f"The channel of the leader token was closed: {words.rstrip('.')}.")

    async def _read(self) -> None:
        """Take what comes into the leader queue: our next token, and whatever else is put there.

        RabbitMQ cancels the consumer when the queue is deleted. The channel stays open then and still carries out
        commands, while a new leader queue makes another leader: the term is over at once.
        """
        assert self._consumer is not None
        while True:
            try:
                delivery = await self._consumer.get()
            except BrokerUnavailableError as error:
                # Ends the term although T still carries out commands: another daemon may lead from now on (lifecycle:
                # token-renewal).
                raise LeadershipLostError(f"The leader token is lost: {error}") from error
            # Compared by content: a token that another daemon publishes meanwhile must not count as the renewed one.
            awaited = self._awaited
            # Our next token. Everything else was put there by another program or daemon.
            if awaited is not None and self._is_message(delivery, awaited[0]):
                self._awaited = None
                if not awaited[1].done():  # cancelled when the token did not come in time: the term is ending
                    awaited[1].set_result(delivery)
            else:
                await self._drop(delivery)

    async def _renew(self, token: Token, interval: float) -> None:
        """Replace the token before the broker's consumer timeout takes it away (lifecycle: token-renewal)."""
        while True:
            # Shorter than the consumer timeout: RabbitMQ would take a token away that is held for longer.
            await self._clock.sleep(interval)
            # The serial tells the new message from the one that is held.
            # The term stays: it numbers leaders, and generations are compared by it (lifecycle: generations).
            token, sent_at = replace(token, serial=token.serial + 1), self._clock.monotonic()
            with self._within_limit():
                delivery = await self._publish_and_await(token)
            # The new one first, then the old one is acknowledged. Crash in between: two tokens, which do no harm.
            await self._hold(delivery, instead_of=self._held, sent_at=sent_at)
            self._log.debug("leader token renewed", term=token.term)

    async def _publish_and_await(self, token: Token) -> Delivery:
        """Publish a token and wait until `_read` has it."""
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
        """The next command, with those directly behind it that can share its answer."""
        # Only commands directly behind each other share an answer: the order of the commands of one key stays.
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
        if self._is_over:  # the reader is about to say why
            for command in batch:
                self._fail(command.answer, LeadershipLostError("The leader token is lost."))
            return
        try:
            for command in batch[:-1]:
                if command.begin is not None:
                    # Sent without an answer. RabbitMQ carries out a channel's commands in order, so that the last
                    # answer covers all.
                    await command.begin(self._channel)
            # Crash while it is under way: the next leader gets the token only after RabbitMQ has carried it out or
            # dropped it.
            result = await last.send(self._channel)
        except OsrdyneError as error:
            kind = LeadershipLostError if isinstance(error, BrokerUnavailableError) else CommandRefusedError
            lost = kind(f"A command on the channel of the leader token failed: {error}")
            for command in batch:  # which of them was refused is not known
                self._fail(command.answer, lost)
            # Any error on T ends the term, for all keys (lifecycle: term-ends-whole).
            raise lost from error
        self._led_at = sent_at
        for command in batch:
            # The caller may have been cancelled: the command was carried out anyway, and no caller needs its result.
            if not command.answer.done():
                command.answer.set_result(result if command is last else None)

    @property
    def _is_over(self) -> bool:
        """Whether the right to act has gone, although the channel may still carry out commands."""
        return self._lost or self._channel.is_closed or (self._consumer is not None and self._consumer.ended)

    @staticmethod
    def _fail(answer: asyncio.Future[Any], error: LeadershipLostError) -> None:
        if not answer.done():
            answer.set_exception(error)
            answer.exception()  # marks the exception as retrieved, also if the caller was cancelled

    async def do(self, command: Callable[[Channel], Awaitable[T]], *, begin: Send | None = None) -> T:
        """Carry out a command on T, in order. It runs to its end also when the caller is cancelled.

        `begin`: the same without waiting for an answer, for a command that returns nothing; it may be sent instead.
        Raises `LeadershipLostError` when it failed: then the term is over.
        """
        if self._is_over:
            raise LeadershipLostError("The leader token is lost.")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # Known before it is queued: a term that ends now fails it, so that no caller waits without end.
        self._pending.add(answer)
        answer.add_done_callback(self._pending.discard)
        # `_serve` carries it out: a caller that is cancelled leaves no command half sent.
        self._commands.append(_Command(command, begin, answer))
        self._new_command.set()
        return await answer

    async def confirm(self, *, since: float | None = None) -> None:
        """Return if T has answered what was sent within the lease, else ping over T (lifecycle: lease).

        `since` (monotonic): T must have answered what was sent after it. A later leader gets the token after that
        answer, and so finds everything that this daemon knew at `since`.
        """
        # A driver call without this may come after the term, against the next leader.
        # A silent T proves nothing: RabbitMQ may have given the token to another daemon after missed heartbeats.
        lapsed = self._clock.monotonic() - self._led_at > self._times.lease
        if self._is_over or lapsed or (since is not None and self._led_at <= since):
            await self.do(lambda channel: channel.ping())


def _last_used(term: int, announced: int | None, *, now: float) -> int:
    """The highest term that may be in use: that of the last token or, when there is none, one from the clock.

    A pool was led before when a term was announced. The announcement comes a moment after the token, so that the last
    term may be missing there. Terms grow by less than one a second.
    """
    if announced is None:
        return term
    return max(term, announced) if term else max(announced, math.floor(now))

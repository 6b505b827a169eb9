"""The leader token: one message in a single-active-consumer queue; who holds it unacknowledged leads.

`TokenChannel` owns the channel T that consumes the token, and is the only way to declare, bind, unbind and delete
request queues: when T is gone, so is the right to act at the broker (LIFECYCLE 1-5). One task sends everything over
T, one command at a time; nothing that can fail is ever sent there. Any error on T ends the term.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Consumer, Delivery, Message
from osrdyne.errors import BrokerUnavailableError, CommandRefusedError, LeadershipLostError, OsrdyneError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import PoolNames

T = TypeVar("T")
Publish = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Token:
    """The content of the token: the number of the term, the host that leads it, and how often it was renewed."""

    term: int
    host: str
    serial: int = 0

    def to_message(self) -> Message:
        return Message(body=json.dumps({"term": self.term, "host": self.host, "serial": self.serial}).encode())

    @classmethod
    def parse(cls, body: bytes) -> Token | None:
        """Read a token; None for anything else."""
        try:
            decoded = json.loads(body)
            return cls(int(decoded["term"]), str(decoded.get("host", "")))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None

    @classmethod
    def from_body(cls, body: bytes) -> Token:
        """Read a token; something that is none counts as term 0, so that it is replaced."""
        return cls.parse(body) or cls(0, "")


class TokenChannel:
    """The channel T of a leader, from the moment it waits for the token."""

    def __init__(
        self, channel: Channel, *, names: PoolNames, host: str, publish: Publish, lease: float, clock: Clock
    ) -> None:
        self._channel = channel
        self._names = names
        self._host = host
        self._publish_token = publish
        self._lease = lease
        self._clock = clock
        self._consumer: Consumer | None = None
        self._held: list[Delivery] = []
        self._commands: asyncio.Queue[tuple[Callable[[Channel], Awaitable[Any]], asyncio.Future[Any]]] = asyncio.Queue()
        self._pending: set[asyncio.Future[Any]] = set()
        self._lost = False
        self._answered_at = clock.monotonic()
        self._log: Logger = get_logger("leader", pool=names.pool)

    async def acquire(self, *, accept: Callable[[Token], None] | None = None) -> tuple[Token, Token]:
        """Wait until this channel is the active consumer and holds the token; returns (previous, own) tokens.

        `accept` may refuse the previous token by raising; then nothing of it was changed.
        All tokens there are get taken, one with the next number is published and confirmed, and only then are the
        others acknowledged: there is never none (LIFECYCLE 1).
        """
        self._consumer = await self._channel.consume(self._names.leader_queue)
        taken = [await self._consumer.get()]
        # The broker pushes every token to the active consumer: what is on its way has mostly arrived after this
        # question, and what is late is taken with the next renewal.
        await self._channel.declare_queue(self._names.leader_queue, passive=True)
        while self._consumer.waiting():
            taken.append(await self._consumer.get())
        previous = max((Token.from_body(delivery.body) for delivery in taken), key=lambda token: token.term)
        if accept is not None:
            accept(previous)
        own = Token(previous.term + 1, self._host)
        self._held = taken
        await self._replace_token(own)
        return previous, own

    async def _replace_token(self, token: Token) -> None:
        """Publish `token`, wait until we hold it, and only then acknowledge every other one."""
        assert self._consumer is not None
        message = token.to_message()
        await self._publish_token(message)
        old = self._held
        while (delivery := await self._consumer.get()).body != message.body:
            old.append(delivery)
        self._held = [delivery]
        for stale in old:
            if Token.parse(stale.body) is None:
                self._log.warning("message in the leader queue that is no token", size_bytes=len(stale.body))
            await stale.ack()
        self._answered_at = self._clock.monotonic()

    async def run(self, token: Token, *, renew_interval: float) -> None:
        """Own the channel for the term: carry out commands, renew the token.

        Ends only by raising a `BrokerError`; every command that waits then, or comes later, fails.
        """
        assert self._consumer is not None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="token channel closed")
                group.create_task(self._renew(token, renew_interval), name="token renewal")
                group.create_task(self._serve(), name="token channel commands")
        finally:
            self._lost = True
            for answer in list(self._pending):
                self._fail(answer, LeadershipLostError("The leader token is lost."))

    async def _watch(self) -> None:
        reason = await self._channel.wait_closed()
        words = "by ourselves" if reason is None else str(reason) or "the connection was lost"
        raise LeadershipLostError(f"The channel of the leader token was closed: {words.rstrip('.')}.")

    async def _renew(self, token: Token, interval: float) -> None:
        """Replace the token before the broker's consumer timeout takes it away (LIFECYCLE 4)."""
        while True:
            await self._clock.sleep(interval)
            token = replace(token, serial=token.serial + 1)
            await self._replace_token(token)
            self._log.debug("leader token renewed", term=token.term)

    async def _serve(self) -> None:
        while True:
            command, answer = await self._commands.get()
            try:
                result = await command(self._channel)
            except OsrdyneError as error:
                kind = LeadershipLostError if isinstance(error, BrokerUnavailableError) else CommandRefusedError
                lost = kind(f"A command on the channel of the leader token failed: {error}")
                self._fail(answer, lost)
                raise lost from error
            self._answered_at = self._clock.monotonic()
            if not answer.done():
                answer.set_result(result)

    @staticmethod
    def _fail(answer: asyncio.Future[Any], error: LeadershipLostError) -> None:
        if not answer.done():
            answer.set_exception(error)
            answer.exception()  # counts as seen, also when whoever asked is gone

    async def do(self, command: Callable[[Channel], Awaitable[T]]) -> T:
        """Carry out a command on T, in order. It runs to its end also when the caller is cancelled.

        Raises `LeadershipLostError` when it failed: then the term is over.
        """
        if self._lost or self._channel.is_closed:
            raise LeadershipLostError("The leader token is lost.")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.add(answer)
        answer.add_done_callback(self._pending.discard)
        self._commands.put_nowait((command, answer))
        return await answer

    async def confirm(self) -> None:
        """Return if T has answered within the lease, else ask it something that cannot fail (LIFECYCLE 23)."""
        if self._lost or self._channel.is_closed or self._clock.monotonic() - self._answered_at > self._lease:
            await self.do(lambda channel: channel.ping())

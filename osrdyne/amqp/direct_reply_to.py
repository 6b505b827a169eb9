"""Replies to direct reply-to addresses, on a connection of their own that may be lost (decision 0016).

RabbitMQ before 4.3 closes the connection (541) that publishes to an address it cannot decode: an invented one, or one
of a node that has left the cluster. Every version closes the connection that looks such an address up. So neither the
leader's publishes nor the requests of a worker use that connection. It is opened with the first reply.

The first reply to an address is published alone, so that a 541 shows which address RabbitMQ does not accept. Later
replies to an address that it has accepted are published concurrently. If the connection is closed while several are in
flight, each of them is published again alone. A connection that cannot be opened, or is lost for another reason, says
nothing about the address: the reply is tried again for `PATIENCE` seconds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiormq.exceptions import ChannelAccessRefused

from osrdyne.aio.clock import Backoff, Clock, now_ms
from osrdyne.amqp.channel import Channel
from osrdyne.amqp.connection import Connection
from osrdyne.amqp.errors import translate_error
from osrdyne.amqp.message import Message
from osrdyne.amqp.version import BrokerVersion
from osrdyne.errors import (
    AddressRefusedError,
    BrokerAccessError,
    BrokerError,
    BrokerInternalError,
    BrokerNotFoundError,
    BrokerSilentError,
    BrokerUnavailableError,
    OsrdyneError,
    PublishRefusedError,
    QueueFullError,
)

PUBLISH_ATTEMPTS = 4
# About two seconds in all: a caller that reads its queue has made room by then.
QUEUE_FULL = Backoff(initial=0.1, factor=4.0, maximum=2.0)
REFUSED = Backoff(initial=0.1, factor=4.0, maximum=10.0)  # Each refusal costs a channel.
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to."  # The beginning of every address, with its dot.
CONNECT_RETRY = Backoff(initial=0.2, maximum=5.0)
UNTIL_NO_DEADLINE = 600.0  # Seconds for which the answer to a request without a deadline is tried.
AT_LEAST = 30.0  # The same for every request, also an expired one: clocks differ, and its caller may still wait.
PATIENCE = 60.0  # Seconds for which a reply waits for a connection; most callers have given up after that.
MAX_PROVEN = 10_000  # Addresses remembered as accepted; with one more, all are forgotten.


class DirectReplies:
    """Publishes to direct reply-to addresses, and looks them up."""

    def __init__(self, open_connection: Callable[[], Awaitable[Connection]], *, clock: Clock) -> None:
        self._open_connection = open_connection
        self._clock = clock
        self._connection: Connection | None = None
        self._channel: Channel | None = None
        self._one_at_a_time = asyncio.Lock()
        self._proven: set[str] = set()
        self._concurrent = 0  # Replies to proven addresses in flight.
        self._concurrent_lost = 0  # How many of those were lost with their connection, since the beginning.
        self._failures = 0
        self._last_failure: BrokerError | None = None
        self._retry_at = -math.inf
        self._closed = False

    async def publish(self, message: Message, address: str) -> None:
        """Publish with a confirm. Raises `AddressRefusedError` when RabbitMQ cannot decode the address, and
        `PublishRefusedError` when no connection could be opened for too long."""
        if address in self._proven and await self._publish_concurrently(message, address):
            return
        until = self._clock.monotonic() + PATIENCE
        async with self._one_at_a_time:
            await self._wait_for_retry(until)
            while (fault := await self._try(address, lambda channel: _publish(channel, message, address))) is not None:
                if self._closed:
                    raise fault
                await self._wait_for_retry(until)
        self._prove(address)

    async def _wait_for_retry(self, until: float) -> None:
        """Wait until a connection may be opened again. Raises `PublishRefusedError` if that is after `until`."""
        delay = self._retry_at - self._clock.monotonic()
        if delay <= 0:
            return
        if self._retry_at > until:
            fault = self._last_failure
            raise PublishRefusedError(f"There is no connection for direct replies: {fault}") from fault
        await self._clock.sleep(delay)

    async def _publish_concurrently(self, message: Message, address: str) -> bool:
        """Publish while others are in flight. False if the connection is lost: the reply is then published alone."""
        channel = self._channel
        if channel is None or channel.is_closed:
            return False
        self._concurrent += 1
        try:
            await _publish(channel, message, address)
        except BrokerSilentError:
            if channel is self._channel:  # not one that was opened meanwhile
                await self._drop()
            raise
        except BrokerUnavailableError:
            # Which of the addresses in flight has closed the connection is not known.
            self._concurrent_lost += 1
            self._proven.discard(address)
            return False
        finally:
            self._concurrent -= 1
        return True

    def _prove(self, address: str) -> None:
        # Forgetting all of them costs each address one publish that waits for its turn.
        if len(self._proven) >= MAX_PROVEN:
            self._proven.clear()
        self._proven.add(address)

    async def has_consumer(self, address: str) -> bool:
        """Whether the address has a consumer. Raises `BrokerError` if RabbitMQ gives no answer now."""
        if self._clock.monotonic() < self._retry_at:
            raise BrokerUnavailableError("There is no connection to look up the reply address.")
        try:
            async with self._one_at_a_time:
                fault = await self._try(address, lambda channel: channel.declare_queue(address, passive=True))
        except (BrokerNotFoundError, AddressRefusedError):
            return False
        if fault is not None:
            raise fault
        return True

    async def _try(self, address: str, act: Callable[[Channel], Awaitable[object]]) -> BrokerError | None:
        """Act once. None on success, else why no connection could be opened, or why it was lost."""
        try:
            channel = await self._open()
        except (BrokerUnavailableError, BrokerAccessError) as error:
            return await self._fail(error)
        lost_before = self._concurrent_lost
        try:
            await act(channel)
        except BrokerInternalError as error:
            if self._concurrent or self._concurrent_lost > lost_before:
                # An accepted address may have become invalid, when its node left the cluster. From now on each address
                # is alone in flight, this one first.
                self._proven.clear()
                return await self._fail(error)
            await self._drop()
            # It was alone in flight, so that this address and no other has closed the connection (541).
            raise AddressRefusedError(f"RabbitMQ does not accept the reply address {address!r}.") from error
        except BrokerSilentError:
            await self._drop()
            raise
        except BrokerUnavailableError as error:
            return await self._fail(error)
        # The connection works: the next failure waits for the shortest delay again.
        self._failures = 0
        return None

    async def _fail(self, error: BrokerError) -> BrokerError:
        self._failures += 1
        self._last_failure = error
        self._retry_at = self._clock.monotonic() + CONNECT_RETRY.delay(self._failures)
        await self._drop()
        return error

    async def _open(self) -> Channel:
        self._check_open()
        if self._channel is not None and not self._channel.is_closed:
            return self._channel
        if self._connection is not None and not self._connection.is_closed:
            with suppress(BrokerUnavailableError):  # the look-up of a missing address closed its channel
                self._channel = await self._connection.channel(confirms=True)
                return self._channel
        await self._drop()
        self._connection = await self._open_connection()
        self._check_open()  # `close` may have been called meanwhile
        self._channel = await self._connection.channel(confirms=True)
        return self._channel

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerUnavailableError("The connection for direct replies was closed.")

    async def _drop(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        """Close the connection; it is not opened again."""
        self._closed = True
        await self._drop()


async def _publish(channel: Channel, message: Message, address: str) -> None:
    await channel.publish(message, exchange="", routing_key=address)


class GuardedChannel:
    """A channel to publish on. Replies and look-ups that could close its connection go over `direct` instead.

    `takes_any`: this RabbitMQ accepts replies to any address, so that only look-ups could close the connection.
    `reopen` opens another channel when RabbitMQ has closed this one because the user may not publish; without it, the
    channel stays closed.
    """

    def __init__(
        self,
        channel: Channel,
        direct: DirectReplies,
        *,
        takes_any: bool = False,
        reopen: Callable[[], Awaitable[Channel]] | None = None,
    ) -> None:
        self._channel = channel
        self._direct = direct
        self._takes_any = takes_any
        self._reopen = reopen
        self._reopening = asyncio.Lock()
        self._refused = False

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        """Publish as `Channel.publish` does."""
        if exchange == "" and routing_key.startswith(DIRECT_REPLY_TO) and not self._takes_any:
            await self._direct.publish(message, routing_key)
            return
        channel = await self._open_channel()
        try:
            await channel.publish(message, exchange=exchange, routing_key=routing_key, mandatory=mandatory)
        except BrokerAccessError:
            self._note_refused(channel)
            raise
        except BrokerUnavailableError as error:
            # Of several publishes in flight, RabbitMQ's refusal is reported to one; the others find a closed channel.
            if self._reopen is None or not channel.is_closed:
                raise
            if not isinstance(reason := await channel.wait_closed(), ChannelAccessRefused):
                raise
            self._note_refused(channel)
            raise translate_error(reason, f"publish to {exchange or repr(routing_key)}") from error

    def _note_refused(self, channel: Channel) -> None:
        # Before `wait_closed` resumes: the end of this channel is not the loss of the connection. A publish on an
        # earlier channel may end after another one was opened.
        if channel is self._channel:
            self._refused = True

    async def _open_channel(self) -> Channel:
        if self._refused and self._reopen is not None:
            async with self._reopening:
                if self._refused:
                    self._channel, self._refused = await self._reopen(), False
        return self._channel

    async def has_consumer(self, address: str) -> bool:
        """Whether this direct reply-to address has a consumer. Raises `BrokerError` if RabbitMQ gives no answer now."""
        return await self._direct.has_consumer(address)

    async def ping(self) -> None:
        await (await self._open_channel()).ping()

    async def wait_closed(self) -> BaseException | None:
        """Wait until the channel is closed for good; return the reason, or None if this side closed it."""
        while True:
            channel = self._channel
            reason = await channel.wait_closed()
            if self._reopen is None or not isinstance(reason, ChannelAccessRefused):
                return reason
            self._note_refused(channel)
            await self._open_channel()

    async def close(self) -> None:
        """Close the connection for replies; the channel belongs to the connection that opened it."""
        await self._direct.close()


async def guarded_channel(
    connection: Connection, open_another: Callable[[], Awaitable[Connection]], *, clock: Clock, reopens: bool = False
) -> GuardedChannel:
    """Open a channel with confirms that no reply address can close. `reopens`: a channel that RabbitMQ closes because
    the user may not publish is replaced."""
    takes_any = BrokerVersion.parse(connection.server_version).takes_any_reply_address
    direct = DirectReplies(open_another, clock=clock)
    channel = await connection.channel(confirms=True)
    reopen = (lambda: connection.channel(confirms=True)) if reopens else None
    return GuardedChannel(channel, direct, takes_any=takes_any, reopen=reopen)


def last_attempt(deadline_ms: int | None, *, clock: Clock) -> float:
    """Until when (monotonic seconds) the answer to a request with this deadline is tried, by controller and workers."""
    left = math.inf if deadline_ms is None else (deadline_ms - now_ms(clock)) / 1000
    return clock.monotonic() + min(max(AT_LEAST, left), UNTIL_NO_DEADLINE)


async def publish_reply(
    publish: Callable[[], Awaitable[None]],
    *,
    clock: Clock,
    until: float | None = None,
    on_wait: Callable[[OsrdyneError], None] = lambda _: None,
) -> None:
    """Publish a reply to any address with `publish`, and again while its queue is full. For controller and workers.

    With `until` (monotonic seconds) it is tried until then, also while the user may not publish; without, a few times.
    `on_wait` is called once, with the error, when the few attempts have failed; an error of it ends the attempts.
    Raises what `publish` raises: the last of these errors, or any other error at once.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await publish()
        except (QueueFullError, BrokerAccessError) as error:
            if until is None and (attempt == PUBLISH_ATTEMPTS or isinstance(error, BrokerAccessError)):
                raise
            if attempt == PUBLISH_ATTEMPTS:
                on_wait(error)
            delay = (REFUSED if isinstance(error, BrokerAccessError) else QUEUE_FULL).delay(attempt)
            if until is not None:
                left = until - clock.monotonic()
                if left <= 0:
                    raise
                delay = min(delay, left)
            await clock.sleep(delay)

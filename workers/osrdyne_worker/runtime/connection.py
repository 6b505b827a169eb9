"""The connection of a worker to the broker, with the channels that its parts share.

A `BrokerConnection` never reconnects, and it is lost as a whole as soon as one of its parts is. `stay_connected` opens
a new one after each loss, and gives up when the log-in is refused for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.amqp import Channel, Connection, ConnectionOptions, connect
from osrdyne.amqp.direct_reply_to import GuardedChannel, guarded_channel
from osrdyne.amqp.version import BrokerVersion
from osrdyne.errors import (
    BrokerAccessError,
    BrokerError,
    BrokerNotFoundError,
    BrokerUnavailableError,
    ConfigurationError,
)
from osrdyne.logs import get_logger
from osrdyne_worker.runtime.exit import AccessRefused, ExitReason, InvalidConfiguration, NoBroker
from osrdyne_worker.runtime.settings import RuntimeSettings

BLOCKED_INTERVAL = 0.5
"""Seconds between two checks of a connection that RabbitMQ has blocked."""
RECONNECT = Backoff(initial=0.2, maximum=4.0, jitter=0.3)
STABLE_AFTER = 10.0
"""Seconds after which a connection counts as stable: after its loss the back-off begins again."""

log = get_logger("worker")


class BrokerConnection:
    """An open connection: a channel for replies, one for retries, and one for look-ups of queues."""

    def __init__(self, connection: Connection, replies: Channel | GuardedChannel, clock: Clock) -> None:
        self.connection = connection
        self.replies = replies
        self._clock = clock
        self._lookups: Channel | None = None
        self._lookups_lock = asyncio.Lock()
        self._retries: Channel | None = None
        self._retries_lock = asyncio.Lock()
        self._failed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_closed(self) -> bool:
        return self.connection.is_closed

    @property
    def counts_returns(self) -> bool:
        """Whether RabbitMQ counts each return as a failed delivery (broker: count-failures-by-reject)."""
        return BrokerVersion.parse(self.connection.server_version).counts_nack

    def fail(self) -> None:
        """Mark the connection as lost: a part of it did not answer."""
        self._failed.set()

    def discard(self, channel: Channel) -> None:
        """Close an unused channel without waiting for it."""
        task = asyncio.create_task(channel.close(), name="discard-channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the connection; never raises."""
        await self.connection.close()
        await self.replies.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def wait_lost(self) -> None:
        """Wait until the connection is lost, then raise `BrokerUnavailableError`."""
        ends = [
            asyncio.ensure_future(self.connection.wait_closed()),
            asyncio.ensure_future(self.replies.wait_closed()),
            asyncio.ensure_future(self._failed.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        # Ends all tasks of this connection: with a part of it lost, they could wait for answers without end.
        raise BrokerUnavailableError("The connection to RabbitMQ was lost.")

    async def until_unblocked(self) -> None:
        """Wait while RabbitMQ blocks this connection: time-outs must not run meanwhile."""
        while self.connection.is_blocked:
            await self._clock.sleep(BLOCKED_INTERVAL)

    async def queue_exists(self, queue: str) -> bool:
        """Look a queue up. A direct reply-to address is a queue as well (broker: replies-are-never-mandatory)."""
        async with self._lookups_lock:
            await self.until_unblocked()
            if self._lookups is None or self._lookups.is_closed:
                self._lookups = await self.connection.channel()
            try:
                # RabbitMQ closes the channel when the queue is missing: hence a channel for this alone.
                await self._lookups.declare_queue(queue, passive=True)
            except BrokerNotFoundError:
                return False
            return True

    async def retry_channel(self) -> Channel:
        """The channel with confirms for retries. A missing exchange closes it and no other channel."""
        async with self._retries_lock:
            if self._retries is None or self._retries.is_closed:
                # Opened at the first retry: most workers never need it.
                self._retries = await self.connection.channel(confirms=True)
            return self._retries

    async def caller_is_gone(self, reply_to: str) -> bool:
        """Whether the client behind a direct reply-to address is gone; False when RabbitMQ does not answer."""
        try:
            if isinstance(self.replies, GuardedChannel):
                return not await self.replies.has_consumer(reply_to)
            return not await self.queue_exists(reply_to)
        except BrokerError:
            return False


async def open_broker_connection(options: ConnectionOptions, clock: Clock) -> BrokerConnection:
    """Connect. Raises what `osrdyne.amqp.connect` raises."""
    connection = await connect(options)
    try:
        replies = await guarded_channel(connection, lambda: connect(options), clock=clock, reopens=True)
        return BrokerConnection(connection, replies, clock)
    except BaseException:
        await connection.close()
        raise


async def stay_connected(
    serve: Callable[[Callable[[], None]], Awaitable[None]],
    *,
    clock: Clock,
    settings: RuntimeSettings,
    request_exit: Callable[[ExitReason], None],
    is_exiting: Callable[[], bool],
) -> None:
    """Call `serve`, which connects and raises `BrokerError` when the connection is lost, again and again. It calls its
    argument once it is connected.

    Requests an exit if the URI is invalid, if RabbitMQ has refused the log-in for `queue_missing_timeout` (the next
    worker may get other credentials), or if there was no connection for `no_broker_timeout`: RabbitMQ, or the whole
    pool, may be gone for good. No request is lost: what the worker had taken returned to its queue with the connection.
    """
    failures, refused_since, connected_at = 0, None, clock.monotonic()
    connected = False

    def note_connected() -> None:
        nonlocal connected
        connected = True

    while True:
        since, connected = clock.monotonic(), False
        try:
            await serve(note_connected)
        except ConfigurationError as error:
            # A further attempt would fail the same way: the URI of this worker does not change.
            request_exit(InvalidConfiguration(f"WORKER_AMQP_URI: {error.message}"))
        except BrokerError as error:
            failures = 1 if clock.monotonic() - since > STABLE_AFTER else failures + 1
            if not is_exiting():
                log.warning("no connection to RabbitMQ", reason=error.message, failures=failures)
            # Counted from the first refusal in a row: one that is followed by a connection was only temporary.
            refused_since = (refused_since or since) if isinstance(error, BrokerAccessError) else None
            now = clock.monotonic()
            connected_at = now if connected else connected_at
            if now - connected_at >= settings.no_broker_timeout:
                request_exit(NoBroker(f"There was no connection to RabbitMQ for {now - connected_at:.0f} s."))
            refused_for = 0.0 if refused_since is None else now - refused_since
            if refused_since is not None and refused_for >= settings.queue_missing_timeout:
                reason = f"RabbitMQ has refused the log-in for {refused_for:.0f} s: {error.message}"
                request_exit(AccessRefused(reason))
        await clock.sleep(RECONNECT.delay(failures))


def loss_of(group: BaseExceptionGroup[BrokerError]) -> str:
    """Why the connection was lost: the first error of the tasks that used it."""
    first = group.exceptions[0]
    return loss_of(first) if isinstance(first, BaseExceptionGroup) else first.message

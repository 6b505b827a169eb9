"""One connection to the broker while it lasts: the channel for replies, and questions about queues.

Made by the worker for each connection. It never reconnects: when anything on it is lost, the whole link is.
"""

from __future__ import annotations

import asyncio

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Connection, ConnectionOptions, connect
from osrdyne.amqp.direct_reply_to import GuardedChannel, guarded_channel
from osrdyne.errors import BrokerError, BrokerNotFoundError, BrokerUnavailableError

BLOCKED_INTERVAL = 0.5
"""Seconds between two looks at a connection that RabbitMQ has blocked."""


class Link:
    """An open connection with what every part of the worker shares on it."""

    def __init__(self, connection: Connection, replies: Channel | GuardedChannel, clock: Clock) -> None:
        self.connection = connection
        self.replies = replies
        self._clock = clock
        self._scratch: Channel | None = None
        self._scratch_lock = asyncio.Lock()
        self._for_retries: Channel | None = None
        self._for_retries_lock = asyncio.Lock()
        self._failed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_closed(self) -> bool:
        return self.connection.is_closed

    def fail(self) -> None:
        """Give the link up: something on it did not answer."""
        self._failed.set()

    def discard(self, channel: Channel) -> None:
        """Close a channel that nobody uses any more, without waiting for it."""
        task = asyncio.create_task(channel.close(), name="discard-channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the connection; never raises."""
        await self.connection.close()
        await self.replies.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def wait_lost(self) -> None:
        """Wait until the link is of no use any more, then raise `BrokerUnavailableError`."""
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
        raise BrokerUnavailableError("The connection to RabbitMQ was lost.")

    async def until_unblocked(self) -> None:
        """Wait while the broker has blocked this connection: no time-out may run then."""
        while self.connection.is_blocked:
            await self._clock.sleep(BLOCKED_INTERVAL)

    async def queue_exists(self, queue: str) -> bool:
        """Look a queue up on a channel of its own; a direct reply-to address is one as well (broker:
        replies-are-never-mandatory)."""
        async with self._scratch_lock:
            await self.until_unblocked()
            if self._scratch is None or self._scratch.is_closed:
                self._scratch = await self.connection.channel()
            try:
                await self._scratch.declare_queue(queue, passive=True)
            except BrokerNotFoundError:
                return False
            return True

    async def retry_channel(self) -> Channel:
        """A channel with confirms for requests that are to be tried again; a missing exchange costs no other."""
        async with self._for_retries_lock:
            if self._for_retries is None or self._for_retries.is_closed:
                self._for_retries = await self.connection.channel(confirms=True)
            return self._for_retries

    async def caller_is_gone(self, reply_to: str) -> bool:
        """Whether the caller behind a direct reply-to address has gone; False when that cannot be told."""
        try:
            if isinstance(self.replies, GuardedChannel):
                return not await self.replies.knows(reply_to)
            return not await self.queue_exists(reply_to)
        except BrokerError:
            return False


async def open_link(options: ConnectionOptions, clock: Clock) -> Link:
    """Connect. Raises what `connect` raises."""
    connection = await connect(options)
    try:
        replies = await guarded_channel(connection, lambda: connect(options), clock=clock)
        return Link(connection, replies, clock)
    except BaseException:
        await connection.close()
        raise

"""A client of the reference's protocol on aio-pika alone: it knows nothing of osrdyne.

Like the reference's own it takes the first reply for the last one, and stops at a status other than `ok` and
`core_error`.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

PATIENCE = 150.0
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"


class ReferenceClient:
    """`replies` holds all that ever came, in order."""

    def __init__(self, channel: AbstractChannel, pool: str) -> None:
        self._channel = channel
        self._pool = pool
        self._waiting: dict[str, asyncio.Future[AbstractIncomingMessage]] = {}
        self.replies: list[AbstractIncomingMessage] = []

    def take(self, reply: AbstractIncomingMessage) -> None:
        self.replies.append(reply)
        waiting = self._waiting.get(reply.correlation_id or "")
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def send(
        self,
        key: str,
        path: str,
        body: bytes = b"",
        *,
        expiration: float | None = None,
        headers: dict[str, bool] | None = None,
    ) -> asyncio.Future[AbstractIncomingMessage]:
        """Publish; the future is the first reply. `expiration` in seconds."""
        correlation_id = str(uuid.uuid4())
        self._waiting[correlation_id] = asyncio.get_running_loop().create_future()
        request = aio_pika.Message(
            body,
            headers={"x-rpc-path": bytearray(path, "utf-8"), **(headers or {})},
            correlation_id=correlation_id,
            reply_to=DIRECT_REPLY_TO,
            expiration=expiration,
        )
        exchange = await self._channel.get_exchange(f"{self._pool}-req-xchg", ensure=False)
        await exchange.publish(request, key, mandatory=True)
        return self._waiting[correlation_id]

    async def status_and_body(self, waiting: asyncio.Future[AbstractIncomingMessage]) -> tuple[str, bytes]:
        reply = await asyncio.wait_for(waiting, PATIENCE)
        status = reply.headers["x-status"]
        assert isinstance(status, bytes | bytearray), f"the reference's client reads no {status!r}"
        assert status in (b"ok", b"core_error"), f"the reference's client stops at {status!r}"
        return status.decode(), reply.body

    async def call(
        self, key: str, path: str, body: bytes = b"", *, headers: dict[str, bool] | None = None
    ) -> tuple[str, bytes]:
        return await self.status_and_body(await self.send(key, path, body, headers=headers))


@asynccontextmanager
async def reference_client(uri: str, pool: str) -> AsyncIterator[ReferenceClient]:
    async with await aio_pika.connect(uri) as connection:
        channel = await connection.channel()
        client = ReferenceClient(channel, pool)
        replies = await channel.get_queue(DIRECT_REPLY_TO, ensure=False)
        await replies.consume(client.take, no_ack=True)
        yield client

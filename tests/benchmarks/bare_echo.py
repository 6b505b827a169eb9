"""The floor of the echo benchmark: the same RPC written with aio-pika alone, as worker and as client process.

    python -m tests.benchmarks.bare_echo worker QUEUE PREFETCH
    python -m tests.benchmarks.bare_echo client EXCHANGE KEY

The URI is in `BARE_AMQP_URI`. It imports nothing of osrdyne, whose patches of the AMQP codec would count as floor. The
client makes a block of calls for every line `CALLS IN_FLIGHT` on its standard input and answers with a JSON line.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from dataclasses import asdict

import aio_pika
import uvloop
from aio_pika.abc import AbstractIncomingMessage

from tests.benchmarks.blocks import run_block

BODY = b"x" * 100
REPLY_TO = "amq.rabbitmq.reply-to"


async def work(queue: str, prefetch: int) -> None:
    """Answer every request with its body: confirmed, and acknowledged only then."""
    connection = await aio_pika.connect(os.environ["BARE_AMQP_URI"])
    channel = await connection.channel()
    await channel.set_qos(prefetch)

    async def answer(request: AbstractIncomingMessage) -> None:
        reply = aio_pika.Message(request.body, correlation_id=request.correlation_id)
        await channel.default_exchange.publish(reply, routing_key=request.reply_to or "", mandatory=False)
        await request.ack()

    await (await channel.get_queue(queue)).consume(answer)
    print("ready", flush=True)
    await asyncio.Event().wait()


class BareClient:
    """Direct reply-to, the request confirmed, answers matched by correlation id."""

    def __init__(self, exchange: aio_pika.abc.AbstractExchange, key: str) -> None:
        self._exchange = exchange
        self._key = key
        self._numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[bytes]] = {}

    async def call(self) -> None:
        correlation_id = str(next(self._numbers))
        answer = self._pending[correlation_id] = asyncio.get_running_loop().create_future()
        message = aio_pika.Message(
            BODY, correlation_id=correlation_id, reply_to=REPLY_TO, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
        )
        await self._exchange.publish(message, routing_key=self._key)
        assert await answer == BODY

    async def take(self, reply: AbstractIncomingMessage) -> None:
        self._pending.pop(reply.correlation_id or "").set_result(reply.body)


async def ask(exchange: str, key: str) -> None:
    connection = await aio_pika.connect(os.environ["BARE_AMQP_URI"])
    channel = await connection.channel()
    client = BareClient(await channel.get_exchange(exchange), key)
    await (await channel.get_queue(REPLY_TO, ensure=False)).consume(client.take, no_ack=True)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        calls, in_flight = map(int, line.split())
        print(json.dumps(asdict(await run_block(client.call, calls=calls, in_flight=in_flight))), flush=True)


if __name__ == "__main__":
    role, first, second = sys.argv[1:]
    uvloop.run(work(first, int(second)) if role == "worker" else ask(first, second))

"""The floors that are programs of their own, with aio-pika alone.

    python -m tests.benchmarks.bare work QUEUE PREFETCH                   a worker that echoes
    python -m tests.benchmarks.bare ask EXCHANGE KEY                      its caller
    python -m tests.benchmarks.bare pass-on ORPHANS EXCHANGE QUEUE        give one orphan to its queue, and end
    python -m tests.benchmarks.bare hold QUEUE                            hold the message of a queue

The URI is in `BARE_AMQP_URI`. Nothing of osrdyne is imported: its patches of the AMQP codec would count as floor. `ask`
makes a block of calls for every line `CALLS IN_FLIGHT` on its standard input and answers with a JSON line; `hold`
prints the time at which the message came to it.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from dataclasses import asdict

import aio_pika
import uvloop
from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage

from tests.benchmarks.blocks import run_block

BODY = b"x" * 100
READY = b"ready\n"
REPLY_TO = "amq.rabbitmq.reply-to"
PERSISTENT = aio_pika.DeliveryMode.PERSISTENT


def _ready() -> None:
    print("ready", flush=True)


async def work(channel: AbstractChannel, queue: str, prefetch: str) -> None:
    """Answer every request with its body: confirmed, and acknowledged only then."""
    await channel.set_qos(int(prefetch))

    async def answer(request: AbstractIncomingMessage) -> None:
        reply = aio_pika.Message(request.body, correlation_id=request.correlation_id)
        await channel.default_exchange.publish(reply, routing_key=request.reply_to or "", mandatory=False)
        await request.ack()

    await (await channel.get_queue(queue)).consume(answer)
    _ready()
    await asyncio.Event().wait()


class BareClient:
    """Direct reply-to, the request confirmed, answers matched by correlation id."""

    def __init__(self, exchange: AbstractExchange, key: str) -> None:
        self._exchange = exchange
        self._key = key
        self._numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[bytes]] = {}

    async def call(self) -> None:
        correlation_id = str(next(self._numbers))
        answer = self._pending[correlation_id] = asyncio.get_running_loop().create_future()
        message = aio_pika.Message(BODY, correlation_id=correlation_id, reply_to=REPLY_TO, delivery_mode=PERSISTENT)
        await self._exchange.publish(message, routing_key=self._key)
        assert await answer == BODY

    async def take(self, reply: AbstractIncomingMessage) -> None:
        self._pending.pop(reply.correlation_id or "").set_result(reply.body)


async def ask(channel: AbstractChannel, exchange: str, key: str) -> None:
    client = BareClient(await channel.get_exchange(exchange), key)
    await (await channel.get_queue(REPLY_TO, ensure=False)).consume(client.take, no_ack=True)
    _ready()
    while line := await asyncio.to_thread(sys.stdin.readline):
        calls, in_flight = map(int, line.split())
        print(json.dumps(asdict(await run_block(client.call, calls=calls, in_flight=in_flight))), flush=True)


async def _next_of(channel: AbstractChannel, queue: str) -> asyncio.Future[AbstractIncomingMessage]:
    arrived: asyncio.Future[AbstractIncomingMessage] = asyncio.get_running_loop().create_future()
    await (await channel.get_queue(queue)).consume(arrived.set_result)  # type: ignore[arg-type]
    return arrived


async def pass_on(channel: AbstractChannel, orphans: str, exchange_name: str, queue_name: str) -> None:
    await channel.set_qos(prefetch_count=1)  # one orphan is all that it passes on
    exchange = await channel.get_exchange(exchange_name)
    queue = await channel.get_queue(queue_name)
    orphan = await (await _next_of(channel, orphans))
    await queue.bind(exchange, orphan.routing_key)
    message = aio_pika.Message(b"", reply_to=orphan.reply_to, delivery_mode=PERSISTENT)
    await exchange.publish(message, routing_key=orphan.routing_key or "")
    await orphan.ack()


async def hold(channel: AbstractChannel, queue: str) -> None:
    held = await _next_of(channel, queue)
    _ready()
    await held
    print(time.time(), flush=True)
    await asyncio.Event().wait()


ROLES = {"work": work, "ask": ask, "pass-on": pass_on, "hold": hold}


async def main(role: str, *arguments: str) -> None:
    async with await aio_pika.connect(os.environ["BARE_AMQP_URI"]) as connection:
        await ROLES[role](await connection.channel(), *arguments)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))

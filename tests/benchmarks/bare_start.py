"""The floor of the start benchmark: from its process start on, give one orphan to its queue, with aio-pika alone.

    python -m tests.benchmarks.bare_start ORPHAN_QUEUE EXCHANGE REQUEST_QUEUE

The URI is in `BARE_AMQP_URI`. It imports nothing of osrdyne.
"""

from __future__ import annotations

import asyncio
import os
import sys

import aio_pika
import uvloop
from aio_pika.abc import AbstractIncomingMessage


async def pass_one_on(orphans: str, exchange_name: str, queue_name: str) -> None:
    connection = await aio_pika.connect(os.environ["BARE_AMQP_URI"])
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=1)  # one orphan is all that it passes on
    exchange = await channel.get_exchange(exchange_name)
    queue = await channel.get_queue(queue_name)
    arrived: asyncio.Future[AbstractIncomingMessage] = asyncio.get_running_loop().create_future()
    await (await channel.get_queue(orphans)).consume(arrived.set_result)  # type: ignore[arg-type]
    orphan = await arrived
    await queue.bind(exchange, orphan.routing_key)
    message = aio_pika.Message(b"", reply_to=orphan.reply_to, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await exchange.publish(message, routing_key=orphan.routing_key or "")
    await orphan.ack()
    await connection.close()


if __name__ == "__main__":
    uvloop.run(pass_one_on(*sys.argv[1:]))

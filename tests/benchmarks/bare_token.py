"""The floor of the take-over benchmark: hold the message of a queue with a single active consumer, with aio-pika alone.

    python -m tests.benchmarks.bare_token QUEUE

The URI is in `BARE_AMQP_URI`. It prints `waiting` once it consumes, and the time at which the message came to it. It
imports nothing of osrdyne.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import aio_pika
import uvloop
from aio_pika.abc import AbstractIncomingMessage


async def hold(queue: str) -> None:
    connection = await aio_pika.connect(os.environ["BARE_AMQP_URI"])
    channel = await connection.channel()
    held: asyncio.Future[AbstractIncomingMessage] = asyncio.get_running_loop().create_future()
    await (await channel.get_queue(queue)).consume(held.set_result)  # type: ignore[arg-type]
    print("waiting", flush=True)
    await held
    print(time.time(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(hold(sys.argv[1]))

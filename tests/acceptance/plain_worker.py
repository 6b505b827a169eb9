"""A worker of the reference's protocol on aio-pika alone: it knows nothing of osrdyne.

It answers with its key, the path and the body of a request. `/error` is answered `core_error`, `/requeue` goes back to
the queue once, and `/hold` is answered when the file exists that its body names.
"""

import asyncio
import os
from pathlib import Path

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

URI = os.environ["WORKER_AMQP_URI"]
KEY = os.environ["WORKER_KEY"]
POOL = os.environ["WORKER_POOL"]
QUEUE = os.environ["WORKER_REQUESTS_QUEUE"]
ACTIVITY_EXCHANGE = os.environ["WORKER_ACTIVITY_EXCHANGE"]


async def main() -> None:
    connection = await aio_pika.connect(URI)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=1)
    activity = await channel.get_exchange(ACTIVITY_EXCHANGE, ensure=False)

    async def report(event: str) -> None:
        await activity.publish(aio_pika.Message(b"", headers={"x-event": bytearray(event, "utf-8")}), KEY)

    async def work(request: AbstractIncomingMessage) -> None:
        await report("request-received")
        path = request.headers["x-rpc-path"]
        assert isinstance(path, bytes | bytearray), f"the reference's worker stops at {path!r}"
        if path == b"/requeue" and not request.redelivered:
            await request.reject(requeue=True)
            return
        while path == b"/hold" and not Path(request.body.decode()).exists():
            await asyncio.sleep(0.05)
        if request.reply_to:
            status = b"core_error" if path == b"/error" else b"ok"
            answer = aio_pika.Message(
                b"|".join([POOL.encode(), KEY.encode(), path, request.body]),
                headers={"x-status": bytearray(status)},
                correlation_id=request.correlation_id,
            )
            await channel.default_exchange.publish(answer, request.reply_to)
        await request.ack()

    await report("started")
    queue = await channel.get_queue(QUEUE, ensure=False)
    async with queue.iterator() as requests:
        async for request in requests:
            await work(request)


asyncio.run(main())

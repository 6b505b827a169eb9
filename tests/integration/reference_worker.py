"""A worker as those of the reference are: it reads only their variables, and reports `started` and `request-received`.

It uses nothing of osrdyne. It answers with the names of its WORKER_* variables, so that a test sees what it was given.
"""

from __future__ import annotations

import asyncio
import json
import os

import aiormq

KEY, POOL = os.environ["WORKER_KEY"], os.environ["WORKER_POOL"]
QUEUE = os.environ.get("WORKER_REQUESTS_QUEUE") or f"{POOL}-req-{KEY}"
ACTIVITY = os.environ.get("WORKER_ACTIVITY_EXCHANGE") or f"{POOL}-activity-xchg"


async def report(channel: aiormq.abc.AbstractChannel, event: bytes) -> None:
    headers = {"x-event": bytearray(event), "x-worker-id": bytearray(os.environ["WORKER_ID"].encode())}
    properties = aiormq.spec.Basic.Properties(headers=headers)
    await channel.basic_publish(b"", exchange=ACTIVITY, routing_key=KEY, properties=properties)


async def main() -> None:
    connection = await aiormq.connect(os.environ["WORKER_AMQP_URI"])
    channel = await connection.channel()
    await channel.basic_qos(prefetch_count=1)
    await report(channel, b"started")

    async def answer(message: aiormq.abc.DeliveredMessage) -> None:
        await report(channel, b"request-received")
        asked = message.header.properties
        variables = sorted(name for name in os.environ if name.startswith("WORKER_"))
        if asked.reply_to is not None:
            properties = aiormq.spec.Basic.Properties(
                correlation_id=asked.correlation_id,
                headers={"x-status": bytearray(b"ok")},
                content_type="application/json",
            )
            body = json.dumps({"key": KEY, "variables": variables}).encode()
            await channel.basic_publish(body, exchange="", routing_key=asked.reply_to, properties=properties)
        assert message.delivery_tag is not None
        await channel.basic_ack(message.delivery_tag)

    await channel.basic_consume(QUEUE, answer, no_ack=False)
    await connection.closing


asyncio.run(main())

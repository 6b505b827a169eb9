"""Objects of a pool deleted by hand under a running daemon: `python -m tests.chaos.deleted_objects queue`.

`queue`: the request queue of a key; `policy`, `binding`: the pool's policy, the orphan binding; `inventory`: the poison
queue. Prints the seconds until requests, or dead letters, are answered again, and the answers. The same script runs on
earlier commits. The daemon is in this process, with the noop driver; a consumer that answers stands for the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from urllib.parse import quote

import httpx
from pydantic import SecretStr

from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import Channel, Connection, ConnectionOptions, Message, connect
from osrdyne.config.models import ApiSettings, BrokerSettings, DriverSettings, PoolSettings, RequestSettings, Settings
from osrdyne.daemon.daemon import Daemon
from osrdyne.daemon.term import StopRequest
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import decode_text
from tests.chaos.nodes import ContainerNode

NAMES = PoolNames("figures")
KEY = Key("a")
REPLIES = "figures-replies"


class Scene:
    """A pool with a daemon, and a client's reply queue."""

    def __init__(self, connection: Connection, api: httpx.AsyncClient) -> None:
        self.connection = connection
        self.api = api
        self.answers: Counter[str] = Counter()
        self.first_answer: float | None = None

    async def publish(self, number: int, key: str = KEY, *, expiration: str | None = None) -> None:
        channel = await self.connection.channel(confirms=True)
        message = Message(b"1", reply_to=REPLIES, correlation_id=str(number), expiration=expiration)
        await channel.publish(message, exchange=NAMES.requests_exchange, routing_key=key)
        await channel.close()

    async def die(self, number: int, reason: str) -> None:
        channel = await self.connection.channel(confirms=True)
        headers: dict[str, object] = {"x-first-death-reason": reason}
        letter = Message(b"1", reply_to=REPLIES, correlation_id=str(number), headers=headers)
        await channel.publish(letter, exchange=NAMES.dead_letter_exchange, routing_key=KEY)
        await channel.close()

    async def collect(self) -> None:
        """Count answers by status."""
        channel = await self.connection.channel()
        consumer = await channel.consume(REPLIES)
        while True:
            delivery = await consumer.get()
            self.answers[decode_text(delivery.headers.get("x-status")) or "?"] += 1
            if self.first_answer is None:
                self.first_answer = time.perf_counter()
            await delivery.ack()

    async def serve(self) -> None:
        """Answer the requests of the key, as often as its queue goes and comes."""
        while True:
            channel: Channel = await self.connection.channel(confirms=True)
            try:
                # RabbitMQ 3.10 ends the connection (541) that consumes a queue in the moment of its declaration.
                while not (await channel.declare_queue(NAMES.request_queue(KEY), passive=True)).ready:
                    await asyncio.sleep(0.1)
                consumer = await channel.consume(NAMES.request_queue(KEY))
                while True:
                    delivery = await consumer.get()
                    answer = Message(b"", headers={"x-status": "ok"}, correlation_id="1")
                    await channel.publish(answer, exchange="", routing_key=str(delivery.properties.reply_to))
                    await delivery.ack()
            except BrokerError:
                await channel.close()
                await asyncio.sleep(0.1)


async def attack(scene: Scene, what: str, seconds: float) -> int:
    """Delete the object; how many answers are expected."""
    admin = await scene.connection.channel()
    if what == "queue":
        await scene.publish(0)
        await asyncio.sleep(3.0)
        await admin.delete_queue(NAMES.request_queue(KEY))
        scene.answers.clear()
        scene.first_answer = None
        for number in range(50):
            await scene.publish(number)
        return 50
    if what == "inventory":
        await admin.delete_queue(NAMES.poison_queue)
        for number in range(100):
            await scene.die(number, "delivery_limit" if number < 90 else "expired")
        return 100
    if what == "policy":
        await scene.publish(0, "other", expiration="500")  # what stays at the head would keep the others from expiring
        await asyncio.sleep(3.0)
        await scene.api.delete(f"/api/policies/%2F/{quote(NAMES.policy)}")
    else:
        await admin.unbind_queue(NAMES.orphan_queue, NAMES.orphan_exchange)
    await asyncio.sleep(min(seconds / 2, 20.0))
    scene.answers.clear()
    scene.first_answer = None
    for number in range(100):
        key = "other" if what == "policy" else f"new{number}"
        await scene.publish(number, key, expiration="500" if what == "policy" else "3000")
    return 100


async def run(what: str, seconds: float, image: str | None) -> dict[str, object]:
    node = ContainerNode(image) if image else EmbeddedBroker()
    await node.start()
    try:
        settings = Settings(
            broker=BrokerSettings(uri=SecretStr(node.amqp_uri), management_uri=SecretStr(node.management_uri)),
            pool=PoolSettings(id=NAMES.pool),
            driver=DriverSettings(name="noop"),
            requests=RequestSettings(max_clock_skew=0.5),
            api=ApiSettings(port=0),
        )
        stop = StopRequest(asyncio.Event())
        daemon = Daemon(settings, clock=SystemClock())
        serving = asyncio.create_task(daemon.serve(stop))
        await daemon.wait_leading()
        connection = await connect(ConnectionOptions(uri=node.amqp_uri, rpc_timeout=60.0))
        await (await connection.channel()).declare_queue(REPLIES)
        async with httpx.AsyncClient(base_url=node.management_uri, trust_env=False, verify=False, timeout=60.0) as api:
            scene = Scene(connection, api)
            helpers = [asyncio.create_task(scene.collect()), asyncio.create_task(scene.serve())]
            expected = await attack(scene, what, seconds)
            began = time.perf_counter()
            while scene.answers.total() < expected and time.perf_counter() < began + seconds:
                await asyncio.sleep(0.05)
            took = round(time.perf_counter() - began, 1)
            for helper in helpers:
                helper.cancel()
        result = {"what": what, "sent": expected, "answers": dict(scene.answers), "seconds": took}
        stop.requested.set()
        await asyncio.wait({serving}, timeout=30.0)
        await connection.close()
        return result
    finally:
        await node.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["queue", "policy", "binding", "inventory"])
    parser.add_argument("--seconds", type=float, default=40.0, help="how long to wait for the answers")
    parser.add_argument("--image", help="a RabbitMQ image instead of the RabbitMQ that is installed")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(run(options.what, options.seconds, options.image))))


if __name__ == "__main__":
    main()

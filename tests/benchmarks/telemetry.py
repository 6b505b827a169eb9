"""Writes to the log of telemetry beside two floors: messages of 1 KiB a second, each confirmed by its stream.

Both floors are written with aio-pika alone. The bare publisher has its messages in memory and publishes to the streams
with publisher confirms, 500 at once. The forwarder consumes its messages from a quorum queue, as the ingress does from
the orphan queue, publishes each, and acknowledges it after the confirm.
"""

from __future__ import annotations

import asyncio
import json
import time

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings, TelemetrySettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.processors.prefetch import PREFETCH
from osrdyne.protocol.names import PoolNames
from tests.benchmarks.figures import Figure, Goal, Round, figure
from tests.benchmarks.ingress_documents import store_documents
from tests.benchmarks.leading import Forwarded, leader

NAMES = PoolNames("bench_telemetry")
LOG = TelemetrySettings(name="bench", partitions=4)
KEYS = [f"device={number}" for number in range(40)]
MESSAGES = 4_000
ROUNDS = 5
BODY = json.dumps({"value": 21.5, "name": "x"}).encode().ljust(1024)
ROUTE = 'FROM /messages/* INTO BrokeredEndpoint("/streams/bench/inputs/log")'
PATIENCE = 300.0


async def run(broker: EmbeddedBroker) -> list[Figure]:
    settings = BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))
    async with ManagementClient(settings) as management:
        documents = {ManifestKind.ROUTES: load_manifest(json.dumps({"routes": {"log": ROUTE}}))}
        await store_documents(management, pool=NAMES.pool, documents=documents)
    async with leader(broker, NAMES.pool, kind="managed", telemetry=LOG):
        pass  # makes the exchanges and streams
    await _ours(broker)
    measured = [(await _publisher(broker), await _forwarder(broker), await _ours(broker)) for _ in range(ROUNDS)]
    name, goal = "telemetry, ingress to log", Goal(0.6, at_least=True)
    return [
        figure(f"{name}, bare publisher", "messages/s", [Round(bare, ours) for bare, _, ours in measured], goal),
        figure(f"{name}, bare forwarder", "messages/s", [Round(careful, ours) for _, careful, ours in measured], goal),
    ]


async def _forwarder(broker: EmbeddedBroker) -> float:
    """Messages a second of a consumer that publishes each message and acknowledges it after the confirm."""
    async with await aio_pika.connect(broker.amqp_uri) as connection:
        channel = await connection.channel(publisher_confirms=True)
        source = await connection.channel()
        await source.set_qos(PREFETCH)
        queue = await source.declare_queue("bench_telemetry_in", durable=True, arguments={"x-queue-type": "quorum"})
        await queue.purge()
        message = aio_pika.Message(BODY, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        for _ in range(0, MESSAGES, 500):
            published = (channel.default_exchange.publish(message, routing_key=queue.name) for _ in range(500))
            await asyncio.gather(*published)
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        taken, left, began = 0, MESSAGES, 0.0

        async def write(arrived: AbstractIncomingMessage) -> None:
            nonlocal taken, left, began
            began = began or time.perf_counter()
            taken += 1
            copy = aio_pika.Message(
                arrived.body, headers={"x-osrdyne-key": KEYS[0]}, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            await channel.default_exchange.publish(copy, routing_key=NAMES.log_stream(taken % LOG.partitions))
            await arrived.ack()
            left -= 1
            if left == 0:
                done.set_result(time.perf_counter())

        await queue.consume(write)
        ended = await asyncio.wait_for(done, PATIENCE)
        return MESSAGES / (ended - began)


async def _publisher(broker: EmbeddedBroker) -> float:
    """Messages a second of a publisher with confirms."""
    async with await aio_pika.connect(broker.amqp_uri) as connection:
        channel = await connection.channel(publisher_confirms=True)
        exchange = channel.default_exchange
        message = aio_pika.Message(
            BODY, headers={"x-osrdyne-key": KEYS[0]}, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
        )
        began = time.perf_counter()
        for start in range(0, MESSAGES, 500):
            streams = [NAMES.log_stream(number % LOG.partitions) for number in range(start, start + 500)]
            await asyncio.gather(*(exchange.publish(message, routing_key=stream) for stream in streams))
        return MESSAGES / (time.perf_counter() - began)


async def _ours(broker: EmbeddedBroker) -> float:
    """Messages a second of a leader that finds them in its orphan queue."""
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, name="osrdyne bench"))
    channel = await connection.channel(confirms=True)
    for start in range(0, MESSAGES, 500):
        keys = [KEYS[number % len(KEYS)] for number in range(start, start + 500)]
        messages = [(amqp.Message(BODY, message_id=f"m{start}"), key) for key in keys]
        await asyncio.gather(
            *(channel.publish(message, exchange=NAMES.requests_exchange, routing_key=key) for message, key in messages)
        )
    await connection.close()
    written = Forwarded(MESSAGES, lambda name: name.startswith(NAMES.log_stream_prefix))
    async with leader(broker, NAMES.pool, kind="managed", activations=written, telemetry=LOG):
        ended = await asyncio.wait_for(written.done, PATIENCE)
        assert written.began is not None
        return MESSAGES / (ended - written.began)

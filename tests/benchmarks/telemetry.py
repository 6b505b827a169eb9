"""Writes to the log of telemetry beside two floors: messages of 1 KiB a second, each confirmed by its stream.

The bare publisher has its messages in memory. The forwarder consumes them from a quorum queue, as the ingress does.
"""

import itertools
import json

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import TelemetrySettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.processors.prefetch import PREFETCH
from osrdyne.protocol.names import PoolNames
from tests.benchmarks.blocks import seconds
from tests.benchmarks.figures import Figure, Goal, Round, figure
from tests.benchmarks.harness import QUORUM, bare_forward, own_channel, publish_all, settings_of
from tests.benchmarks.ingress_documents import store_documents
from tests.benchmarks.leading import Forwarded, leader

NAMES = PoolNames("bench_telemetry")
LOG = TelemetrySettings(name="bench", partitions=4)
KEYS = [f"device={number}" for number in range(40)]
MESSAGES = 4_000
ROUNDS = 5
BODY = json.dumps({"value": 21.5, "name": "x"}).encode().ljust(1024)
ROUTE = 'FROM /messages/* INTO BrokeredEndpoint("/streams/bench/inputs/log")'
BARE_QUEUE = "bench_telemetry_in"


async def run(broker: EmbeddedBroker) -> list[Figure]:
    async with ManagementClient(settings_of(broker)) as management:
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
    streams = itertools.cycle(map(NAMES.log_stream, range(LOG.partitions)))

    def copy(message: AbstractIncomingMessage) -> tuple[aio_pika.Message, str]:
        return _bare_message(message.body), next(streams)

    async with own_channel(broker) as channel:
        await channel.declare_queue(BARE_QUEUE, arguments=QUORUM)
        await publish_all(MESSAGES, lambda _: channel.publish(amqp.Message(BODY), exchange="", routing_key=BARE_QUEUE))
    return await bare_forward(broker, BARE_QUEUE, copy, exchange="", prefetch=PREFETCH, count=MESSAGES)


async def _publisher(broker: EmbeddedBroker) -> float:
    """Messages a second of a publisher with confirms."""
    async with await aio_pika.connect(broker.amqp_uri) as connection:
        exchange = (await connection.channel(publisher_confirms=True)).default_exchange
        message, streams = _bare_message(BODY), itertools.cycle(map(NAMES.log_stream, range(LOG.partitions)))
        publishing = publish_all(MESSAGES, lambda _: exchange.publish(message, routing_key=next(streams)))
        return MESSAGES / await seconds(publishing)


def _bare_message(body: bytes) -> aio_pika.Message:
    return aio_pika.Message(body, headers={"x-osrdyne-key": KEYS[0]}, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)


async def _ours(broker: EmbeddedBroker) -> float:
    """Messages a second of a leader that finds them in its orphan queue."""
    async with own_channel(broker) as channel:

        async def publish(number: int) -> None:
            message = amqp.Message(BODY, message_id=f"m{number}")
            await channel.publish(message, exchange=NAMES.requests_exchange, routing_key=KEYS[number % len(KEYS)])

        await publish_all(MESSAGES, publish)
    written = Forwarded(MESSAGES, lambda name: name.startswith(NAMES.log_stream_prefix))
    async with leader(broker, NAMES.pool, kind="managed", activations=written, telemetry=LOG):
        return await written.rate()

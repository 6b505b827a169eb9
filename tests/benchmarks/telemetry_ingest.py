"""The ingest of a backlog of telemetry, beside a Spark job that only reads the same messages from RabbitMQ.

One worker of two cores does both in turn, over ranges of one stream. The ingest also parses the events, writes them as
Parquet files to disk with `fsync`, and commits them. Events have about 100 bytes.
"""

import json
import time

from osrdyne import amqp
from osrdyne.client import AsyncClient
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import PoolNames
from tests.benchmarks.blocks import seconds
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.harness import own_directory
from tests.filled_streams import fill
from tests.integration.worker_process import stage

SPARK = {"master": "local[2]", "conf": {"spark.driver.memory": "1g", "spark.ui.enabled": False}}
MESSAGES = 100_000
"""In each range."""
ROUNDS = 2
ENQUEUED = 1_795_341_600_000
PATIENCE = 900.0


async def run(broker: EmbeddedBroker) -> list[Figure]:
    return [await _measure(broker, events) for events in (1, 10)]


async def _measure(broker: EmbeddedBroker, events: int) -> Figure:
    """Events a second, with so many events in each message."""
    pool, key = f"bench_ingest_{events}", "cold/0"
    messages = (_message(number, events) for number in range(MESSAGES * (ROUNDS + 1)))
    await fill(broker.amqp_uri, PoolNames(pool).log_stream(0), messages)
    with own_directory() as directory:
        uri = directory / "uri"
        uri.write_text(broker.amqp_uri)
        config = {"uri_file": str(uri), "tables": {"cold": {"directory": f"{directory}/cold"}}, "tasks": 2}
        async with stage(broker.amqp_uri, pool, key) as worker, AsyncClient(broker.amqp_uri, pool) as client:
            await worker.start(app="tests.benchmarks.ingest_app:app", config=config, spark=SPARK, ready=False)
            # The first range warms both up.
            rounds = [await _round(client, key, number, events) for number in range(ROUNDS + 1)][1:]
    name = f"telemetry, cold ingest, {events} event{'s' if events > 1 else ''} a message"
    return figure(name, "events/s", rounds, Goal(50_000, Comparison.ABSOLUTE, at_least=True))


def _message(number: int, events: int) -> amqp.Message:
    rows = [
        {"series": f"temperature-{index}", "ts": "2026-11-22T10:00:00.123Z", "value": number / 7, "quality": "good"}
        for index in range(events)
    ]
    headers = {"x-osrdyne-key": f"plant/{number % 50}", "x-osrdyne-enqueued": ENQUEUED + number}
    return amqp.Message(json.dumps(rows).encode(), message_id=f"m{number}", headers=headers)


async def _round(client: AsyncClient, key: str, number: int, events: int) -> Round:
    limits = {"start": number * MESSAGES, "stop": (number + 1) * MESSAGES}
    floor = await seconds(client.call(key, "/read", limits, timeout=PATIENCE))
    began = time.perf_counter()
    answer = (await client.call(key, "/ingest", {"max_offsets": MESSAGES}, timeout=PATIENCE)).json()
    ours = time.perf_counter() - began
    assert (answer["rows"], answer["offsets"]["start"]) == (MESSAGES * events, limits["start"])
    return Round(MESSAGES * events / floor, MESSAGES * events / ours)

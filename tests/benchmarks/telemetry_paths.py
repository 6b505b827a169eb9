"""The hot, last-value and cold paths of telemetry, while the warm table keeps up, fails, and is an hour behind.

The states alternate in one run. The warm table fails because its directory refuses writes. To put it behind, the
benchmark writes a backlog of one hour to the log; afterwards it lets the table store all of it without the throttle.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import httpx
from aio_pika.abc import AbstractIncomingMessage

from osrdyne import amqp
from osrdyne.client import AsyncClient
from osrdyne.config.models import Settings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.dev.stack import SAMPLE_SPARK_CONF, running_daemon
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER
from osrdyne.telemetry.last_values.query import LastValues
from osrdyne.telemetry.scheduler import RETRY
from osrdyne_worker.pipelines.telemetry.table import Table
from tests.acceptance.daemon_process import until
from tests.benchmarks.figures import Comparison, Figure, Goal, compared_percentiles
from tests.benchmarks.harness import own_channel, own_directory, publish_all
from tests.benchmarks.last_values import last_value
from tests.stored_telemetry import refusing_writes

POOL, INGEST = "bench_paths", "bench_paths_ingest"
NAMES = PoolNames(POOL)
STREAM_NAME = NAMES.log_stream(0)
ROUTES = {
    "alarms": {"route": "FROM /messages/* WHERE level = 'alarm' INTO $upstream", "priority": 0},
    "log": 'FROM /messages/* INTO BrokeredEndpoint("/streams/bench/inputs/log")',
}
SITE = "site-1"
RATE = 720
"""Events a minute of the throttle: one unit of S1."""
IN_MESSAGE = 10
BACKLOG = 60 * RATE // IN_MESSAGE
"""Messages with the events of one hour."""
UNLIMITED = {"rate": {"events_per_minute": 100_000_000, "event_bytes": 1024}}
ROUNDS, SECONDS = 3, 8.0
PACE, LOAD_PACE = 0.1, 0.02
"""Seconds between two measurements of a path, and between two messages of the load."""
PATIENCE = 600.0
PATHS = ("hot path", "last value", "cold path")
GOALS = {50: Goal(1.25), 95: Goal(1.5), 99: Goal(1.5)}


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds: `bare` from publish to a bare consumer, those of each path from publish or confirm."""

    bare: list[float]
    paths: dict[str, list[float]]


async def run(broker: EmbeddedBroker) -> list[Figure]:
    with own_directory() as directory:
        async with _running(broker, directory) as bench:
            rounds = [(await bench.healthy(), await bench.failing(), await bench.behind()) for _ in range(ROUNDS + 1)]
    del rounds[0]
    hot = [(behind.bare, behind.paths[PATHS[0]]) for _, _, behind in rounds]
    name = "telemetry, publish to handler, warm an hour behind"
    figures = compared_percentiles(name, "ms", hot, {50: Goal(50, Comparison.ABSOLUTE)})
    for place, state in ((2, "warm an hour behind"), (1, "warm fails")):
        for path in PATHS:
            both = [(states[0].paths[path], states[place].paths[path]) for states in rounds]
            figures += compared_percentiles(f"telemetry, {path}, {state}", "ms", both, GOALS)
    return figures


@dataclass
class _Bench:
    client: AsyncClient
    ingests: AsyncClient
    channel: amqp.Channel
    values: LastValues
    tables: dict[str, Table]
    bare: _Bare
    offsets: dict[str, int]
    """Of the messages in the log, by their ids."""
    warm: dict[str, Any] = field(default_factory=lambda: UNLIMITED)
    """The request for ingests of the warm table."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with a change of `warm`."""
    failures: int = 0
    """Ingests of the warm table that have failed in a row."""
    _number: int = 0

    async def healthy(self) -> Times:
        """Measure while the warm table keeps up."""
        self.warm = UNLIMITED
        self.changed.set()
        await self._until_stored("warm")
        return await self._measure()

    async def failing(self) -> Times:
        """Measure while the warm table refuses writes, and only it."""
        with refusing_writes(self.tables["warm"]):
            await self._until_stored("cold")
            await until(lambda: self.failures, "an ingest of the warm table has failed", timeout=PATIENCE, interval=0.2)
            times = await self._measure()
            assert self.failures
        self.changed.set()
        return times

    async def behind(self) -> Times:
        """Measure while the warm table is an hour behind, and only it."""
        self.warm = {}
        backlog = list(_backlog())
        publish = partial(self.channel.publish, exchange="", routing_key=STREAM_NAME)
        await publish_all(len(backlog), lambda number: publish(backlog[number]))
        await self._until_stored("cold")
        times = await self._measure()
        unread = self.stored("cold") - self.stored("warm")
        assert unread > 0.9 * BACKLOG, f"the warm table is only {unread} messages behind"
        return times

    def stored(self, table: str) -> int:
        return self.tables[table].positions().get(0, 0)

    async def keep_ingesting(self) -> None:
        """Request ingests of the warm table every second, or when its throttle allows the next one, or later after
        failures, as the scheduler does. The leader requests those of the cold table."""
        while True:
            self.changed.clear()
            answer = await self.ingests.call(
                "warm/0", "/ingest", self.warm, timeout=PATIENCE, idempotent=True, raise_on_error=False
            )
            if answer.status == "ok":
                self.failures, pause = 0, max(1.0, answer.json().get("next_after", 0.0))
            else:
                self.failures += 1
                pause = RETRY.delay(self.failures)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), pause)

    async def _until_stored(self, table: str) -> None:
        """Wait until a table and the last values have what is in the log now."""
        name, _ = await self._publish()

        def is_stored() -> bool:
            return name in self.offsets and self.stored(table) > self.offsets[name]

        await until(is_stored, f"the table {table} has what is in the log", timeout=PATIENCE, interval=0.2)
        await self._until_readable(name, interval=0.2)

    async def _measure(self) -> Times:
        confirmed: dict[str, float] = {}
        times = Times([], {path: [] for path in PATHS})
        end = time.monotonic() + SECONDS

        async def hot() -> None:
            while time.monotonic() < end:
                times.bare.append(await self.bare.time())
                began = time.monotonic()
                reply = await self.client.call(SITE, "/alarm", b"{}", headers={"level": "alarm"}, timeout=PATIENCE)
                times.paths["hot path"].append(1000 * (reply.json()["handled"] - began))
                await asyncio.sleep(PACE)

        async def last_value() -> None:
            while time.monotonic() < end:
                name, at = await self._publish()
                await self._until_readable(name, interval=0.005)
                times.paths["last value"].append(1000 * (time.monotonic() - at))
                await asyncio.sleep(PACE)

        async def load() -> None:
            while time.monotonic() < end:
                name, confirmed[name] = await self._publish()
                await asyncio.sleep(LOAD_PACE)

        async def cold() -> None:
            while time.monotonic() < end or confirmed:
                stored, now = await asyncio.to_thread(self.stored, "cold"), time.monotonic()
                for name in [one for one in confirmed if self.offsets.get(one, stored) < stored]:
                    times.paths["cold path"].append(1000 * (now - confirmed.pop(name)))
                await asyncio.sleep(0.05)

        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for path in (hot, last_value, load, cold):
                group.create_task(path())
        return times

    async def _publish(self) -> tuple[str, float]:
        """Publish an event as a device does; the name of its series, and when RabbitMQ has confirmed it."""
        self._number += 1
        name = f"m{self._number}"
        message = amqp.Message(json.dumps({"series": name, "value": self._number}).encode(), message_id=name)
        await self.channel.publish(message, exchange=NAMES.requests_exchange, routing_key=SITE)
        return name, time.monotonic()

    async def _until_readable(self, series: str, *, interval: float) -> None:
        async with asyncio.timeout(PATIENCE):
            while await last_value(self.values, SITE, series) is None:
                await asyncio.sleep(interval)


def _backlog() -> Iterator[amqp.Message]:
    """The messages of the last hour."""
    now = int(time.time() * 1000)
    for number in range(BACKLOG):
        events = [{"series": f"old-{place}", "value": number} for place in range(IN_MESSAGE)]
        enqueued = now - 3_600_000 * (BACKLOG - number) // BACKLOG
        yield amqp.Message(json.dumps(events).encode(), headers={KEY_HEADER: "site-2", ENQUEUED_HEADER: enqueued})


class _Bare:
    """A publisher and a consumer of a quorum queue, with aio-pika alone."""

    def __init__(self, channel: Any, queue: Any) -> None:
        self._channel, self._queue = channel, queue
        self._arrived: asyncio.Future[float] | None = None

    async def consume(self) -> None:
        async def note(message: AbstractIncomingMessage) -> None:
            if self._arrived is not None and not self._arrived.done():
                self._arrived.set_result(time.monotonic())
            await message.ack()

        await self._queue.consume(note)

    async def time(self) -> float:
        """Milliseconds from a publish to the consumer."""
        self._arrived = asyncio.get_running_loop().create_future()
        message = aio_pika.Message(b"{}", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        began = time.monotonic()
        await self._channel.default_exchange.publish(message, routing_key=self._queue.name)
        return 1000 * (await asyncio.wait_for(self._arrived, PATIENCE) - began)


@asynccontextmanager
async def _running(broker: EmbeddedBroker, directory: Path) -> AsyncIterator[_Bench]:
    """Start the daemons and all workers, and store a first event in each table."""
    at = {"uri": broker.amqp_uri, "management_uri": broker.management_uri}
    uri = directory / "uri"
    uri.touch(mode=0o600)
    uri.write_text(broker.amqp_uri)
    common = {"broker": at, "api": {"port": 0, "socket": "off"}}
    cold = {"name": "cold", "pool": INGEST, "target_lag": "1s", "interval": "1s"}
    log_pool = {
        "pool": {"id": POOL, "kind": "managed"},
        "worker": {"app": "tests.benchmarks.alarm_app:app"},
        "telemetry": {"name": "bench", "partitions": 1, "tables": [cold]},
    }
    stored = {name: Table(directory / name) for name in ("cold", "warm")}
    tables = {name: {"directory": str(table.directory)} for name, table in stored.items()}
    tables["warm"]["preset"] = "store-s1"
    worker = {
        "app": "osrdyne_worker.pipelines.ingest:app",
        "spark_master": "local[2]",
        "spark_conf": {**SAMPLE_SPARK_CONF, "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"},
        "config": {"pool": POOL, "uri_file": str(uri), "tasks": 2, "tables": tables},
    }
    ingest_pool = {"pool": {"id": INGEST}, "worker": worker}
    offsets: dict[str, int] = {}

    async def note(message: AbstractIncomingMessage) -> None:
        if message.message_id is not None:
            offsets[message.message_id] = int(str(message.headers["x-stream-offset"]))
        await message.ack()

    async with (
        running_daemon(Settings.model_validate(common | log_pool)) as running,
        running_daemon(Settings.model_validate(common | ingest_pool)),
        await aio_pika.connect(broker.amqp_uri) as bare_connection,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.api.port}", trust_env=False, timeout=60) as api,
        AsyncClient(broker.amqp_uri, POOL) as client,
        AsyncClient(broker.amqp_uri, INGEST) as ingests,
        own_channel(broker) as channel,
    ):
        (await api.put("/v1/routes", json={"routes": ROUTES}, params={"author": "bench"})).raise_for_status()
        bare_channel = await bare_connection.channel(publisher_confirms=True)
        await bare_channel.set_qos(1_000)
        log = await bare_channel.declare_queue(STREAM_NAME, durable=True, passive=True)
        await log.consume(note, arguments={"x-stream-offset": "first"})
        queue = await bare_channel.declare_queue("bench-paths-bare", durable=True, arguments={"x-queue-type": "quorum"})
        bare = _Bare(bare_channel, queue)
        await bare.consume()
        values = LastValues(running)
        try:
            bench = _Bench(client, ingests, channel, values, stored, bare, offsets)
            await client.call(SITE, "/alarm", b"{}", headers={"level": "alarm"}, timeout=PATIENCE)
            ingesting = asyncio.create_task(bench.keep_ingesting())
            try:
                yield bench
                assert not ingesting.done()
            finally:
                ingesting.cancel()
                await asyncio.wait({ingesting})
        finally:
            await values.close()

"""Last values of telemetry: how fast a backlog is written, and how soon after its confirm an event is readable."""

import asyncio
import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import aio_pika
import psycopg
import yaml
from aio_pika.abc import AbstractIncomingMessage

from osrdyne import amqp
from osrdyne.config.models import Settings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import LastValueStoreError
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER
from osrdyne.telemetry.last_values.query import LastValues
from osrdyne.telemetry.last_values.values import LastValue
from tests.acceptance.last_value_process import LastValueProcess
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, compared_percentiles, figure
from tests.benchmarks.harness import PATIENCE, own_channel, own_directory
from tests.filled_streams import STREAM, batched, fill
from tests.postgresql_server import running_postgresql

PARTITIONS = 4
EVENTS = 5_000
"""In each partition, one in each message. Half of them are the first of their series."""
TRANSACTION = 1_000
"""Rows in a transaction of the baseline: as many messages as the reader has in flight from a partition."""
ROUNDS = 3
RATE = 100
"""Messages a second, while single ones are timed."""
TIMED = 50
START = 1_795_341_600_000
KEY = "bench"
BARE = "bench-bare-last-value"
COLUMNS = ("pool", *LastValue._fields)
READABLE_GOALS = dict.fromkeys((50, 95), Goal(250, Comparison.ABSOLUTE))


async def run(broker: EmbeddedBroker) -> list[Figure]:
    pool = "bench_last_values"
    for partition in range(PARTITIONS):
        await fill(broker.amqp_uri, PoolNames(pool).log_stream(partition), map(_message, range(EVENTS)))
    with own_directory() as directory, running_postgresql() as server:
        upserts: dict[str, list[Round]] = {"SQLite": [], "PostgreSQL": []}
        for number in range(ROUNDS):
            file = directory / f"{number}.db"
            floor = _upserts_into_sqlite(directory / f"floor-{number}.db")
            ours = await _backlog(_settings(broker, pool, {"file": str(file)}), directory)
            upserts["SQLite"].append(Round(floor, ours))
            floor = _upserts_into_postgresql(server.new_database())
            chosen = {"store": "postgresql", "uri": server.new_database()}
            ours = await _backlog(_settings(broker, pool, chosen), directory)
            upserts["PostgreSQL"].append(Round(floor, ours))
        readable = await _readable(broker, directory)
    goal = Goal(5_000, Comparison.ABSOLUTE, at_least=True)
    return [
        *(figure(f"telemetry, last values, backlog, {name}", "upserts/s", upserts[name], goal) for name in upserts),
        *compared_percentiles("telemetry, last value readable after confirm", "ms", readable, READABLE_GOALS),
    ]


def _settings(broker: EmbeddedBroker, pool: str, last_values: dict[str, str], *, partitions: int = PARTITIONS) -> Any:
    return {
        "pool": {"id": pool, "kind": "managed"},
        "broker": {"uri": broker.amqp_uri, "management_uri": broker.management_uri},
        "telemetry": {"name": "bench", "partitions": partitions, "last_values": last_values},
        "log": {"level": "warning"},
    }


def _message(number: int) -> amqp.Message:
    return _event(f"s{number % (EVENTS // 2)}", START + number, number)


def _event(series: str, ts: int, value: int) -> amqp.Message:
    event = {"series": series, "ts": ts, "value": value}
    return amqp.Message(json.dumps(event).encode(), headers={KEY_HEADER: KEY, ENQUEUED_HEADER: START})


# --- a backlog


async def _backlog(settings: Any, directory: Path) -> float:
    """Upserts a second of a reader that finds a backlog, from its first transaction to its last one."""
    values = LastValues(Settings.model_validate(settings))
    began, before = 0.0, 0
    try:
        process = _reader(settings, directory)
        with process.running():
            async with asyncio.timeout(PATIENCE):
                while (events := await _events(values)) < PARTITIONS * EVENTS:
                    process.assert_runs()
                    if events and not began:
                        began, before = time.perf_counter(), events
                    await asyncio.sleep(0.005)
            assert began, "the reader wrote everything in one transaction"
            return (events - before) / (time.perf_counter() - began)
    finally:
        await values.close()


async def _events(values: LastValues) -> int:
    with suppress(LastValueStoreError):  # before the reader has made the tables
        found = await values.totals()
        return found.events if found else 0
    return 0


def _reader(settings: Any, directory: Path) -> LastValueProcess:
    config = directory / "osrdyne.yaml"
    config.touch(mode=0o600)
    config.write_text(yaml.safe_dump(settings))
    return LastValueProcess(config)


def _rows() -> Iterator[tuple[Any, ...]]:
    for partition in range(PARTITIONS):
        for number in range(EVENTS):
            series = f"s{number % (EVENTS // 2)}"
            text = (None, None, None)
            place = (START, partition, number, 0, None)
            yield ("bench", f"{KEY}/{partition}", series, START + number, None, "telemetry", number, *text, *place)


def _table(real: str, text: str = "TEXT") -> str:
    numbers = {"ts", "sent_ts", "enqueued", "log_partition", "log_offset", "log_index"}
    types = {"value": real, **dict.fromkeys(numbers, "BIGINT")}
    columns = ", ".join(f"{name} {types.get(name, text)}" for name in COLUMNS)
    return f"CREATE TABLE floor ({columns}, PRIMARY KEY (pool, key, series))"


def _upsert(mark: str) -> str:
    changed = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[3:])
    marks = ", ".join([mark] * len(COLUMNS))
    return f"INSERT INTO floor VALUES ({marks}) ON CONFLICT (pool, key, series) DO UPDATE SET {changed}"


def _sqlite(file: Path) -> closing[sqlite3.Connection]:
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return closing(connection)


def _upserts_into_sqlite(file: Path) -> float:
    """Upserts a second."""
    with _sqlite(file) as connection:
        connection.execute(f"{_table('REAL')} WITHOUT ROWID")
        return _timed(connection, _upsert("?"))


def _upserts_into_postgresql(uri: str) -> float:
    with psycopg.connect(uri) as connection:
        connection.execute(_table("DOUBLE PRECISION", 'TEXT COLLATE "C"'))
        connection.commit()
        return _timed(connection, _upsert("%s"))


def _timed(connection: Any, statement: str) -> float:
    began = time.perf_counter()
    for several in batched(_rows(), TRANSACTION):
        connection.cursor().executemany(statement, several)
        connection.commit()
    return PARTITIONS * EVENTS / (time.perf_counter() - began)


# --- the time until an event is readable


async def _readable(broker: EmbeddedBroker, directory: Path) -> list[tuple[list[float], list[float]]]:
    """Milliseconds from the confirm of an event until it is readable: those of the baseline and ours, by round."""
    pool = "bench_last_value"
    settings = _settings(broker, pool, {"file": str(directory / "readable.db")}, partitions=1)
    stream = PoolNames(pool).log_stream(0)
    await fill(broker.amqp_uri, stream, [])
    values = LastValues(Settings.model_validate(settings))

    async def ours(number: int) -> None:
        while await last_value(values, KEY, f"timed-{number}") is None:
            await asyncio.sleep(0.002)

    try:
        with _reader(settings, directory).running():
            async with own_channel(broker) as channel, _bare_reader(broker, directory / "bare.db", BARE) as bare:
                rounds = []
                for number in range(ROUNDS + 1):
                    floor = await _times(channel, BARE, bare, first=number * TIMED)
                    rounds.append((floor, await _times(channel, stream, ours, first=number * TIMED)))
                return rounds[1:]  # the first one warms up
    finally:
        await values.close()


async def last_value(values: LastValues, key: str, series: str) -> LastValue | None:
    with suppress(LastValueStoreError):  # before the reader has made the tables
        for value in (await values.page(key, series=series, after=None, limit=1)).values:
            return value
    return None


async def _times(
    channel: amqp.Channel, stream: str, until_readable: Callable[[int], Awaitable[None]], *, first: int
) -> list[float]:
    """Time single events, one after the other, while others come at a steady rate."""

    async def publish(series: str) -> None:
        await channel.publish(_event(series, START, 1), exchange="", routing_key=stream)

    async def others() -> None:
        began, number = time.perf_counter(), 0
        while True:
            await publish(f"s{number % 1_000}")
            number += 1
            await asyncio.sleep(max(0.0, began + number / RATE - time.perf_counter()))

    async def timed(number: int) -> float:
        await publish(f"timed-{number}")
        confirmed = time.perf_counter()
        await until_readable(number)
        return 1000 * (time.perf_counter() - confirmed)

    busy = asyncio.create_task(others())
    try:
        async with asyncio.timeout(PATIENCE):
            found = []
            for number in range(first, first + TIMED):
                found.append(await timed(number))
                await asyncio.sleep(0.05)
            return found
    finally:
        busy.cancel()
        await asyncio.wait({busy})


@asynccontextmanager
async def _bare_reader(
    broker: EmbeddedBroker, file: Path, stream: str
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Write each message of a stream to SQLite; yields a wait for the event of this number."""
    written = defaultdict[str, asyncio.Event](asyncio.Event)
    with _sqlite(file) as database:
        database.execute("CREATE TABLE floor (series TEXT PRIMARY KEY, ts BIGINT, value REAL) WITHOUT ROWID")

        async def write(message: AbstractIncomingMessage) -> None:
            event = json.loads(message.body)
            database.execute("INSERT OR REPLACE INTO floor VALUES (?, ?, ?)", tuple(event.values()))
            database.commit()
            await message.ack()
            written[event["series"]].set()

        async with await aio_pika.connect(broker.amqp_uri) as connection:
            channel = await connection.channel()
            await channel.set_qos(1_000)
            queue = await channel.declare_queue(stream, durable=True, arguments=dict(STREAM))
            await queue.consume(write, arguments={"x-stream-offset": "next"})

            async def until_written(number: int) -> None:
                await written[f"timed-{number}"].wait()

            yield until_written

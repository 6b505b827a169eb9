"""One million events, and 20 kills: each confirmed event is in the table once, and each last value is the newest.

Two pools on a RabbitMQ of their own: `plant` has the log and the last values, and requests the ingests of `ingest`,
which stores the log with Spark. A client publishes with confirms and sends again what was not confirmed. Meanwhile the
daemon of either pool, a worker of the ingest, the reader of the last values or RabbitMQ is killed, at points that a
seed chooses: `OSRDYNE_SEED`, with `OSRDYNE_EVENTS` for a shorter run.
"""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from itertools import islice
from typing import Any

import pyarrow.parquet as pq
import pytest
from daemon_process import PATIENCE, DaemonProcess, until
from last_value_process import LastValueProcess
from managed_callers import LONG, apply, ingesting, managed

from osrdyne import amqp
from osrdyne.amqp.streams import StreamConnection
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import PoolNames
from osrdyne.telemetry.last_values.sqlite import SqliteStore
from osrdyne_worker.pipelines.telemetry.table import Table
from tests.connections import connected

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

EVENTS = int(os.environ.get("OSRDYNE_EVENTS", "1000000"))
SEED = int(os.environ.get("OSRDYNE_SEED", "1"))
IN_MESSAGE = 10
MESSAGES = EVENTS // IN_MESSAGE
PARTITIONS = 2
KEYS = 50
START = 1_795_341_600_000
"""The earliest time of an event, in milliseconds."""
VICTIMS = ("daemon of the log", "daemon of the ingest", "worker", "worker", "reader of the last values", "RabbitMQ")
KILLS = 20
UNCONFIRMED = 400
PATIENTLY: dict[str, Any] = {"connect_timeout": PATIENCE, "rpc_timeout": PATIENCE}
ROUTE = 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")'
NAMES = PoolNames("plant")


def key_of(message: int) -> str:
    return f"device/{message % KEYS}"


def time_of(message: int) -> int:
    """The time of its events: those of a key are out of order, and in each time are several."""
    return START + message // KEYS * 7919 % (MESSAGES // KEYS) // 10


class Publisher:
    """Publishes messages with confirms, each again until it is confirmed."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._left, self._rest = list[int](), iter(range(MESSAGES))
        self.confirmed = self.repeated = 0

    async def run(self) -> None:
        while self.confirmed < MESSAGES:
            with suppress(BrokerError):
                async with connected(self._uri, **PATIENTLY) as connection:
                    channel = await connection.channel(confirms=True)
                    while await self._publish_several(channel) and self.confirmed < MESSAGES:
                        pass
            await asyncio.sleep(0.1)

    async def _publish_several(self, channel: amqp.Channel) -> bool:
        """Whether all of them were confirmed."""
        self._left += islice(self._rest, UNCONFIRMED - len(self._left))
        several = self._left
        ended = await asyncio.gather(*(self._publish(channel, one) for one in several), return_exceptions=True)
        self._left = [one for one, error in zip(several, ended, strict=True) if error is not None]
        self.confirmed += len(several) - len(self._left)
        self.repeated += len(self._left)
        return not self._left

    async def _publish(self, channel: amqp.Channel, number: int) -> None:
        first = number * IN_MESSAGE
        ts = time_of(number)
        events = [{"series": f"s{index}", "ts": ts, "value": first + index} for index in range(IN_MESSAGE)]
        message = amqp.Message(json.dumps(events).encode(), message_id=f"m{number}")
        await channel.publish(message, exchange=NAMES.requests_exchange, routing_key=key_of(number), mandatory=True)


class Killer:
    """Kills one process at each of its points, and each kind of process at least once."""

    def __init__(
        self, broker: EmbeddedBroker, plant: DaemonProcess, ingest: DaemonProcess, reader: LastValueProcess
    ) -> None:
        self._broker, self._plant, self._ingest, self._reader = broker, plant, ingest, reader
        self._random = random.Random(SEED)
        self.points = sorted(self._random.sample(range(MESSAGES), KILLS))
        self._victims = [*VICTIMS, *self._random.choices(VICTIMS, k=KILLS - len(VICTIMS))]
        self._random.shuffle(self._victims)
        self.killed: Counter[str] = Counter()

    async def run(self, publisher: Publisher) -> None:
        for point, victim in zip(self.points, self._victims, strict=True):
            await until(lambda at=point: publisher.confirmed >= at, f"message {point} is confirmed", timeout=LONG)
            match victim:
                case "daemon of the log":
                    await self._plant.restart()
                case "daemon of the ingest":
                    await self._ingest.restart()
                case "worker":
                    workers = await until(self._ingest.workers, "a worker of the ingest runs", timeout=LONG)
                    os.kill(self._random.choice(workers).pid, signal.SIGKILL)
                case "reader of the last values":
                    self._reader.restart()
                case "RabbitMQ":
                    await self._broker.kill()
                    await self._broker.start()
                    await self._plant.until_leading()
                    await self._ingest.until_leading()
            self.killed[victim] += 1


async def orphans(uri: str) -> int:
    """Messages in the orphan queue that the leader has not taken."""
    async with connected(uri, **PATIENTLY) as connection:
        channel = await connection.channel()
        return (await channel.declare_queue(NAMES.orphan_queue, passive=True)).ready


async def ends_of_log(uri: str) -> dict[int, int]:
    """The offset after the last message, by partition."""
    options = amqp.ConnectionOptions(uri=uri, **PATIENTLY)
    async with await StreamConnection.open(options, silence=PATIENCE) as streams:
        bounds = [await streams.bounds(NAMES.log_stream(partition)) for partition in range(PARTITIONS)]
    return {partition: one.stop for partition, one in enumerate(bounds) if one is not None}


Place = tuple[int, int, int]
"""Partition, offset and index of an event."""


def rows(files: Iterable[str]) -> Iterator[tuple[Place, int]]:
    """The place and the value of each row."""
    for file in files:
        table = pq.read_table(file, partitioning=None, columns=["partition", "offset", "index", "value"])
        partitions, offsets, indexes, values = (column.to_pylist() for column in table.columns)
        yield from zip(zip(partitions, offsets, indexes, strict=True), map(int, values), strict=True)


def newest(stored: Iterable[tuple[Place, int]]) -> dict[tuple[str, str], tuple[int, Place, int]]:
    """By key and series: the time, the place and the value of the event with the latest time, then place."""
    found: dict[tuple[str, str], tuple[int, Place, int]] = {}
    for place, value in stored:
        number, index = divmod(value, IN_MESSAGE)
        series, event = (key_of(number), f"s{index}"), (time_of(number), place, value)
        found[series] = max(event, found.get(series, event))
    return found


def last_values(store: SqliteStore) -> dict[tuple[str, str], tuple[int, Place, int]]:
    """The same, as the reader has stored it."""
    return {
        (key, one.series): (one.ts // 1000, (one.log_partition, one.log_offset, one.log_index), int(one.value or 0))
        for key in map(key_of, range(KEYS))
        for one in store.find(key, series=None, after=None, limit=IN_MESSAGE + 1)
    }


async def test_million_events_are_stored_once_in_spite_of_kills(make_daemon, tmp_path):
    table, last = Table(tmp_path / "cold"), tmp_path / "last-values.db"
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(EmbeddedBroker())
        at = {"amqp_uri": broker.amqp_uri, "management_uri": broker.management_uri}
        telemetry = {
            "name": "plant",
            "partitions": PARTITIONS,
            "tables": [{"name": "cold", "pool": "ingest", "target_lag": "1s"}],
            "last_values": {"file": str(last)},
        }
        plant = managed(make_daemon, **at, pool="plant", telemetry=telemetry)
        config = {"max_offsets": 5000, "timeout": PATIENCE}
        lasting = {"unbind_delay": "10m", "start_attempts": 5}
        ingest = ingesting(make_daemon, tmp_path, "plant", table, config=config, **at, pool="ingest", lifecycle=lasting)
        await asyncio.gather(plant.start(), ingest.start())
        apply(plant, tmp_path, {"log": ROUTE})
        reader = LastValueProcess(plant.config)
        stack.enter_context(reader.running())
        publisher = Publisher(broker.amqp_uri)
        killer = Killer(broker, plant, ingest, reader)
        async with asyncio.TaskGroup() as group:
            group.create_task(publisher.run())
            group.create_task(killer.run(publisher))

        looks: list[dict[int, int]] = []

        async def is_stored():
            # Twice in a row: the leader holds messages that are in neither place for a moment.
            positions = table.positions()
            looks.append(await ends_of_log(broker.amqp_uri))
            is_whole = len(looks) > 1 and looks[-1] == looks[-2] and not await orphans(broker.amqp_uri)
            return is_whole and all(positions.get(one, 0) >= end for one, end in looks[-1].items())

        await until(is_stored, "the table has the whole log", timeout=LONG, interval=2)
        stored = await asyncio.to_thread(lambda: list(rows(table.files())))
        store = SqliteStore(last, pool="plant")
        stack.callback(store.close)
        await until(lambda: store.totals().events >= len(stored), "the reader has read the whole log", timeout=LONG)
        read, found = store.totals(), last_values(store)
    count, places, values = len(stored), {place for place, _ in stored}, {value for _, value in stored}
    print(
        f"seed {SEED}: {EVENTS} events in {MESSAGES} messages, {publisher.repeated} messages published again, "
        f"killed {dict(killer.killed)}, {count} rows, {count - len(places)} twice, "
        f"{EVENTS - len(values)} lost, {len(found)} last values of {read.events} events"
    )
    assert len(places) == count
    assert values == set(range(EVENTS))
    assert count >= EVENTS
    assert sum(killer.killed.values()) == KILLS
    assert table.files(invalid=True) == []
    assert found == newest(stored)
    assert len(found) == KEYS * IN_MESSAGE
    # A transaction of the reader has the values and the position: none was skipped, and none counted twice.
    assert (read.events, read.invalid, read.lost) == (count, 0, 0)

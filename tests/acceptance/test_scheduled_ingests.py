"""Ingests that a leader schedules, on RabbitMQ: the leader is killed before the answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from daemon_process import OSRDYNE, PATIENCE, MakeDaemon, until
from managed_callers import apply, managed, without_workers
from spark_fixtures import SMALL_SPARK

from osrdyne import amqp
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.config.models import BrokerSettings
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import AUTHORIZATION_HEADER, PATH_HEADER
from osrdyne.protocol.names import PoolNames
from osrdyne_worker.pipelines.telemetry.table import Table

pytestmark = [pytest.mark.nightly, pytest.mark.one_rabbitmq]

ROUTE = 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")'
SPARK_PATIENCE = 600.0


def tables(pool: str, **more: object) -> dict[str, Any]:
    return {"name": "plant", "partitions": 1, "tables": [{"name": "cold", "pool": pool, "target_lag": "1s", **more}]}


async def publish(channel: amqp.Channel, names: PoolNames, first: int, stop: int) -> None:
    """Two events in each message."""

    async def one(number: int) -> None:
        body = json.dumps([{"series": "a", "value": number}, {"series": "b"}]).encode()
        message = amqp.Message(body, message_id=f"m{number}")
        await channel.publish(message, exchange=names.requests_exchange, routing_key="plant/1", mandatory=True)

    await asyncio.gather(*map(one, range(first, stop)))


@pytest.mark.proves("telemetry/leader-dies-between-request")
async def test_leader_killed_before_the_answer_requests_the_ingest_again(
    make_daemon: MakeDaemon, broker_settings: BrokerSettings, pool_id: str, tmp_path: Path
) -> None:
    ingest = PoolNames(f"{pool_id}_i")
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker_settings.uri.get_secret_value()))
    channel = await connection.channel(confirms=True)
    await declare_topology(channel, pool_topology(ingest.pool))
    token = tmp_path / "token"
    token.write_text("a-secret-token\n")
    daemon = managed(make_daemon, telemetry=tables(ingest.pool, token_file=str(token)))
    await without_workers(daemon)
    apply(daemon, tmp_path, {"log": ROUTE})
    await publish(channel, PoolNames(pool_id), 0, 10)

    # The test is the pool of the ingest: its requests come to the queue of orphans.
    requests = await channel.consume(ingest.orphan_queue)
    async with asyncio.timeout(PATIENCE):
        first = await requests.get()
        quotas = tmp_path / "quotas.json"
        quotas.write_text(
            json.dumps(
                {
                    "rates": [
                        {"name": "all", "preset": "store-s2"},
                        {"name": "t", "keys": "cold/.", "preset": "store-s1"},
                    ]
                }
            )
        )
        done = daemon.osrdyne("quota", "apply", str(quotas), "--author", "test")
        assert done.returncode == 0, done.stderr
        daemon.kill()
        await daemon.start()
        second = await requests.get()
    assert [(one.routing_key, one.headers[PATH_HEADER]) for one in (first, second)] == [("cold/0", b"/ingest")] * 2
    assert [one.headers[AUTHORIZATION_HEADER] for one in (first, second)] == ["Bearer a-secret-token"] * 2
    assert "a-secret-token" not in daemon.log()
    assert json.loads(first.body) == {}
    assert json.loads(second.body) == {"rate": {"events_per_minute": 720.0, "event_bytes": 1024}}
    assert all(isinstance(one.headers[DEADLINE_HEADER], int) for one in (first, second))
    assert first.properties.reply_to != second.properties.reply_to

    answer = {"offsets": {"start": 0, "stop": 10, "end": 10}, "rows": 19, "invalid": 1}
    # The address of the killed leader is gone: its answer is dropped.
    for one in (first, second):
        reply = amqp.Message(
            json.dumps(answer).encode(), correlation_id=one.properties.correlation_id, headers={"x-status": "ok"}
        )
        await channel.publish(reply, exchange="", routing_key=str(one.properties.reply_to))
        await one.ack()

    async def is_shown() -> Any:
        [table] = (await daemon.get("/v1/telemetry"))["tables"]
        [partition] = table["partitions"]
        return partition["stored"] and partition

    shown = await until(is_shown, "the leader has the answer")
    assert (shown["stored"], shown["invalid"], shown["in_flight"], shown["failures"]) == (19, 1, False, 0)

    async def has_no_lag() -> bool:
        [reader] = (await daemon.get("/v1/telemetry"))["readers"]
        return bool(reader["at"]) and reader["messages"] == 0

    await until(has_no_lag, "the position of the table is stored")
    printed = daemon.osrdyne("telemetry", "status")
    assert printed.stdout.split()[-5:] == ["cold", "0", "19", "1", "-"], printed.stderr
    await connection.close()


@pytest.mark.timeout(1800)
@pytest.mark.proves("telemetry/leader-dies-between-request")
async def test_scheduled_ingest_stores_each_event_once_although_its_leader_was_killed(
    make_daemon: MakeDaemon, broker_settings: BrokerSettings, pool_id: str, tmp_path: Path
) -> None:
    uri = tmp_path / "uri"
    uri.write_text(broker_settings.uri.get_secret_value())
    table = Table(tmp_path / "cold")
    config = {
        "pool": pool_id,
        "uri_file": str(uri),
        "tables": {"cold": {"directory": str(table.directory)}},
        "max_offsets": 40,
        "timeout": 120,
    }
    worker = str(OSRDYNE.with_name("osrdyne-worker"))
    ingest = make_daemon(
        pool=f"{pool_id}_i",
        driver={"options": {"command": [worker, "osrdyne_worker.pipelines.ingest:app"]}},
        worker={
            "app": "osrdyne_worker.pipelines.ingest:app",
            "spark_master": SMALL_SPARK["master"],
            "spark_conf": SMALL_SPARK["conf"],
            "config": config,
        },
        lifecycle={"stop_delay": "10m"},
    )
    daemon = managed(make_daemon, telemetry=tables(ingest.pool))
    await asyncio.gather(ingest.start(), without_workers(daemon))
    apply(daemon, tmp_path, {"log": ROUTE})
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker_settings.uri.get_secret_value()))
    channel = await connection.channel(confirms=True)
    await publish(channel, PoolNames(pool_id), 0, 100)

    async def is_in_flight() -> bool:
        [table] = (await daemon.get("/v1/telemetry"))["tables"]
        return bool(table["partitions"][0]["in_flight"])

    await until(is_in_flight, "the leader has requested an ingest")
    daemon.kill()
    await daemon.start()
    await publish(channel, PoolNames(pool_id), 100, 150)

    def is_stored() -> bool:
        return table.positions().get(0, 0) >= 150

    await until(is_stored, "all messages are stored", timeout=SPARK_PATIENCE, interval=1.0)
    rows: list[tuple[int, int]] = []
    for path in table.files():
        columns = pq.read_table(path, partitioning=None).select(["offset", "index"]).to_pydict()
        rows += zip(columns["offset"], columns["index"], strict=True)
    # RabbitMQ may use an offset without a message; the events of each message are there once.
    assert len(rows) == len(set(rows)) == 300
    assert {index for _, index in rows} == {0, 1}
    await connection.close()

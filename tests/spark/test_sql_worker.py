"""A real worker process with the SQL pipeline, asked through a real RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aio_pika
import psutil
import pytest
from spark_fixtures import SHORT_LIVED

from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.protocol.statuses import decode_text

KEY = Key("tpch/sf=0.001")
START_TIMEOUT = 400.0


class Asker:
    """Publishes to the request queue and waits for the reply."""

    def __init__(self, channel: aio_pika.abc.AbstractChannel, queue: str, replies: aio_pika.abc.AbstractQueue) -> None:
        self._channel = channel
        self._queue = queue
        self._replies = replies

    async def ask(self, path: str, **body: Any) -> tuple[str | None, dict[str, Any]]:
        """The status and the JSON body of the reply."""
        await self.publish(path, **body)
        return await self.reply()

    async def publish(self, path: str, **body: Any) -> None:
        message = aio_pika.Message(
            json.dumps(body).encode(), headers={"x-rpc-path": path}, reply_to=self._replies.name, correlation_id=path
        )
        await self._channel.default_exchange.publish(message, routing_key=self._queue)

    async def reply(self) -> tuple[str | None, dict[str, Any]]:
        async with asyncio.timeout(START_TIMEOUT):
            while (reply := await self._replies.get(fail=False)) is None:
                await asyncio.sleep(0.05)
        await reply.ack()
        return decode_text(reply.headers["x-status"]), json.loads(reply.body)


def environment(uri: str, pool: str, config: dict[str, Any]) -> dict[str, str]:
    names = PoolNames(pool)
    conf = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": SHORT_LIVED}
    spark = {"master": "local[1]", "conf": {**conf, "spark.sql.shuffle.partitions": 1}}
    return WorkerEnvironment(
        worker_id=WorkerId("w1"),
        key=KEY,
        pool=pool,
        amqp_uri=uri,
        requests_queues=(names.request_queue(KEY),),
        activity_exchange=names.activity_exchange,
        control_exchange=names.control_exchange,
        config={"runtime": {"stop_grace": 30}, "spark": spark, "app": config},
    ).to_variables()


@pytest.fixture
async def channel(broker: Any) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    connection = await aio_pika.connect(broker.amqp_uri)
    async with connection:
        yield await connection.channel()


@pytest.mark.timeout(1200)
async def test_worker_answers_queries_and_leaves_nothing_behind(
    broker: Any, pool_id: str, channel: aio_pika.abc.AbstractChannel, tpch: Path
) -> None:
    region = {"view": "region", "path": f"{tpch}/sf=0.001/region.parquet", "key_columns": ["r_regionkey"]}
    config = {"datasets": [{"key": KEY, "tables": [region]}], "coalesce": True}
    names = PoolNames(pool_id)
    await channel.declare_exchange(names.activity_exchange, "fanout", durable=True)
    await channel.declare_exchange(names.control_exchange, "topic", durable=True)
    queue = names.request_queue(KEY)
    await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
    asker = Asker(channel, queue, await channel.declare_queue(exclusive=True))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "osrdyne_worker.main",
        "osrdyne_worker.pipelines.sql:app",
        env={**os.environ, **environment(broker.amqp_uri, pool_id, config)},
    )
    try:
        status, body = await asker.ask("/sql", query="select count(*) as n from region")
        assert (status, body["rows"]) == ("ok", [[5]])
        for _ in range(20):  # they share runs
            await asker.publish("/sql", query="select max(r_name) as name from region")
        assert [(await asker.reply())[1]["rows"] for _ in range(20)] == [[["MIDDLE EAST"]]] * 20
        status, body = await asker.ask("/sql", query="drop view region")
        assert (status, body["error"]["code"]) == ("error", "statement_not_allowed")
        status, body = await asker.ask("/lookup", table="region", key={"r_regionkey": 3}, columns=["r_name"])
        assert (status, body["rows"]) == ("ok", [["EUROPE"]])
        status, body = await asker.ask("/lookup", table="region", key={"r_regionkey": "3"})
        assert (status, body["error"]["code"]) == ("error", "invalid_parameter")
        jvms = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 240) == 0
        assert psutil.wait_procs(jvms, timeout=120)[1] == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

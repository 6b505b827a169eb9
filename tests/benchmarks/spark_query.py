"""A small query through osrdyne, beside the same query in the same SparkSession without it.

Once with the same text all the time: the SQL pipeline has checked it then, and Spark has analysed it. And once with a
text that is new each time, for both. Look-ups are answered in batches, and by a handler that runs each by itself.
"""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from osrdyne.client import AsyncClient
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.harness import own_directory
from tests.integration.worker_process import stage

POOL = "bench_spark"
KEY = "tpch/sf=0.01"
QUERY = "select o_orderkey, o_custkey, o_totalprice, o_orderdate from orders where o_orderkey = {number}"
"""Few rows without an order: the row limit of the SQL pipeline would give Spark a cheaper plan than the floor's."""
SPARK = {
    "master": "local[2]",
    "conf": {"spark.driver.memory": "768m", "spark.sql.shuffle.partitions": 2, "spark.ui.enabled": False},
}
WARM_UP = 40
TIMES = 5
ROUNDS = 41
ROUNDS_OF_NEW = 21
LOOKUPS = 200
ROUNDS_OF_LOOKUPS = 3


async def run(broker: EmbeddedBroker) -> list[Figure]:
    with own_directory() as directory:
        arguments = ["parquet", "-s", "0.01", "--tables", "orders", "--output-dir", directory]
        generator = Path(sys.executable).with_name("tpchgen-cli")
        subprocess.run([generator, *arguments], check=True, capture_output=True, timeout=60)
        orders = {"view": "orders", "path": f"{directory}/orders.parquet", "key_columns": ["o_orderkey"]}
        config = {"datasets": [{"key": KEY, "tables": [orders]}]}
        async with stage(broker.amqp_uri, POOL, KEY) as pool:
            # Requests wait in their queue until the worker is ready.
            await pool.start(app="tests.benchmarks.spark_app:app", config=config, spark=SPARK, ready=False)
            async with AsyncClient(broker.amqp_uri, POOL) as client:
                return await _compare(client)


async def _compare(client: AsyncClient) -> list[Figure]:
    same, new = itertools.repeat(QUERY.format(number=7)), (QUERY.format(number=number) for number in itertools.count())
    await _ours(client, next(new))  # the SQL pipeline opens a view when a query first names it
    await _round(client, new, WARM_UP)
    await _round(client, same, 1)
    asked_again = [await _round(client, same, TIMES) for _ in range(ROUNDS)]
    asked_first = [await _round(client, new, TIMES) for _ in range(ROUNDS_OF_NEW)]
    lookups = [
        Round(await _lookups(client, "/lookup_one"), await _lookups(client, "/lookup"))
        for _ in range(ROUNDS_OF_LOOKUPS)
    ]
    return [
        figure("SQL pipeline, /lookup", "per second", lookups, Goal(20.0, at_least=True)),
        figure("Spark query", "ms", asked_again, Goal(10.0, Comparison.DIFFERENCE)),
        figure("Spark query, new text", "ms", asked_first, Goal(20.0, Comparison.DIFFERENCE)),
    ]


async def _round(client: AsyncClient, queries: Iterator[str], times: int) -> Round:
    """Median milliseconds of `times` queries each way."""
    pairs = [(await _floor(client, next(queries)), await _ours(client, next(queries))) for _ in range(times)]
    floors, ours = zip(*pairs, strict=True)
    return Round(median(floors), median(ours))


async def _floor(client: AsyncClient, query: str) -> float:
    """Milliseconds of one query, taken around it in the worker."""
    reply = await client.call(KEY, "/in_process", {"query": query}, timeout=300)
    return float(reply.json())


async def _ours(client: AsyncClient, query: str) -> float:
    """Milliseconds of one query, taken by its caller."""
    began = time.perf_counter()
    reply = await client.call(KEY, "/sql", {"query": query}, timeout=300)
    taken = (time.perf_counter() - began) * 1000
    assert reply.json()["row_count"] <= 1
    return taken


async def _lookups(client: AsyncClient, path: str) -> float:
    """Look-ups per second, `LOOKUPS` sent at once."""
    row = {"table": "orders", "columns": ["o_custkey", "o_totalprice", "o_orderdate"]}
    wanted = [{**row, "key": {"o_orderkey": number + 1}} for number in range(LOOKUPS)]
    began = time.perf_counter()
    replies = await asyncio.gather(*(client.call(KEY, path, one, timeout=300) for one in wanted))
    taken = time.perf_counter() - began
    assert sum(reply.json() is not None for reply in replies) > 0
    return LOOKUPS / taken

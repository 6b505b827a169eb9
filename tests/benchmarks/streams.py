"""The memory of a result of 1 GB that is streamed: of the worker with its JVM and Python processes, and of the client.

The floor is plain `toArrow` of the same rows in the same worker, which holds them all. Memory is the PSS at its peak,
less what the processes had after a small stream.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable

import psutil

from osrdyne.client import AsyncClient, RequestError
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne_worker.pooled.memory import process_memory
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.integration.worker_process import stage

POOL = "bench_streams"
KEY = "k"
ROWS = 1024**3 // 64
SMALL_ROWS = ROWS // 8
SPARK = {
    "master": "local[2]",
    "conf": {"spark.driver.memory": "1g", "spark.driver.maxResultSize": "8g", "spark.ui.enabled": False},
}
TIMEOUT = 1800.0
SAMPLE_INTERVAL = 0.1
MIB = 1024 * 1024


async def run(broker: EmbeddedBroker) -> list[Figure]:
    async with stage(broker.amqp_uri, POOL, KEY) as pool:
        await pool.channel.declare_exchange(pool.names.credit_exchange, "direct")
        worker = await pool.start(app="tests.benchmarks.stream_app:app", spark=SPARK, ready=False)
        async with AsyncClient(broker.amqp_uri, POOL, default_timeout=TIMEOUT) as client:
            await _read(client, SMALL_ROWS)
            began = time.monotonic()
            of_worker, of_client = await _growth(_read(client, ROWS), worker.pid)
            seconds = time.monotonic() - began
            sys.stderr.write(f"  streamed in {seconds:.1f} s, worker {of_worker:.0f} MiB, client {of_client:.0f} MiB\n")
            began = time.monotonic()
            # More and smaller partitions: eight of 128 MB exhaust this heap.
            collected = client.call(KEY, "/collected", {"rows": ROWS, "partitions": 64})
            of_floor, _ = await _growth(_until_it_ends(collected), worker.pid)
            sys.stderr.write(f"  collected in {time.monotonic() - began:.1f} s\n")
            sys.stderr.flush()
    goal = Goal(128, Comparison.ABSOLUTE)
    return [
        figure("1 GB streamed: growth of the worker", "MiB", [Round(of_floor, of_worker)], goal),
        figure("1 GB streamed: growth of the client", "MiB", [Round(of_floor, of_client)], goal),
    ]


async def _read(client: AsyncClient, rows: int) -> None:
    found = 0
    async for batch in client.call_batches(KEY, "/rows", {"rows": rows}):
        found += batch.num_rows
    assert found == rows


async def _until_it_ends(call: Awaitable[object]) -> None:
    """Wait for the floor. It may exhaust the heap: its memory until then is a lower bound."""
    try:
        await call
    except RequestError as error:
        sys.stderr.write(f"  plain toArrow failed: {error}\n")


async def _growth(work: Awaitable[object], worker: int) -> tuple[float, float]:
    """MiB by which the memory of the worker and of this process grew at most."""
    before = _memory(worker)
    task = asyncio.ensure_future(work)
    peaks = list(before)
    while not task.done():
        await asyncio.wait({task}, timeout=SAMPLE_INTERVAL)
        now = await asyncio.to_thread(_memory, worker)
        peaks = [max(one) for one in zip(peaks, now, strict=True)]
    await task
    of_worker, of_client = (peak - start for peak, start in zip(peaks, before, strict=True))
    return of_worker / MIB, of_client / MIB


def _memory(worker: int) -> tuple[int, int]:
    """Bytes of the worker with its descendants, and of this process alone."""
    return process_memory(worker)[1] or 0, int(psutil.Process().memory_full_info().pss)

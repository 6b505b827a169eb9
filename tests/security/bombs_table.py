"""Print what each query bomb does to a real worker: `python -m tests.security.bombs_table [NAME…]`.

One worker with room for two requests serves one key on a RabbitMQ of its own; a dead one is replaced at once, as the
controller does. Each bomb has five seconds. Meanwhile another caller asks `select 1` again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.messages import Response
from tests.integration.worker_process import Stage, WorkerProcess, stage
from tests.security.query_bombs import ALL, Bomb

DEADLINE = 5.0
PATIENCE = 140.0
PAUSE = 0.25
SPARK = {
    "master": "local[2]",
    "conf": {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": 2, "spark.default.parallelism": 2},
}


async def main(names: list[str]) -> None:
    bombs = [bomb for bomb in ALL if not names or bomb.name in names]
    broker = EmbeddedBroker()
    await broker.start()
    try:
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(
                [Path(sys.executable).with_name("tpchgen-cli"), "parquet", "-s", "0.001", "-T", "region",
                 "--output-dir", directory], check=True, capture_output=True,
            )  # fmt: skip
            config = {"datasets": [{"key": "k", "tables": [{"view": "region", "path": f"{directory}/region.parquet"}]}]}
            async with stage(broker.amqp_uri, f"b{secrets.token_hex(4)}") as pool:
                worker = await start(pool, config)
                print("| bomb | answered after, s | status | worker alive | others' longest wait, s |")
                print("|---|---|---|---|---|", flush=True)
                for bomb in bombs:
                    worker = await measure(pool, worker, bomb, config)
    finally:
        await broker.close()


async def start(pool: Stage, config: dict[str, object]) -> WorkerProcess:
    worker = await pool.start(
        app="osrdyne_worker.pipelines.sql:app", runtime={"concurrency": 2}, spark=SPARK, config=config, ready=False
    )
    print("a worker starts", worker.pid, file=sys.stderr, flush=True)
    return worker


async def measure(pool: Stage, worker: WorkerProcess, bomb: Bomb, config: dict[str, object]) -> WorkerProcess:
    await ask(pool, "select 1 as warm", PATIENCE)
    await ask(pool, "select count(*) from region", PATIENCE)
    starts = 0
    waits: list[float] = []
    done = asyncio.Event()

    async def others() -> None:
        while not done.is_set():
            since = time.monotonic()
            await ask(pool, f"select {len(waits)} as other", None)
            waits.append(time.monotonic() - since)
            await asyncio.sleep(PAUSE)

    async def replace() -> None:
        nonlocal worker, starts
        while True:
            await worker.process.wait()
            starts += 1
            worker = await start(pool, config)

    tasks = [asyncio.create_task(others()), asyncio.create_task(replace())]
    since = time.monotonic()
    answer = await ask(pool, bomb.query, DEADLINE)
    took = time.monotonic() - since
    await asyncio.sleep(max(0.0, 15.0 - took) if took > 2 else 0.5)  # what follows the answer belongs to the bomb
    done.set()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(tasks[0], PATIENCE)
    tasks[1].cancel()
    longest = f"{max(waits):.1f}" if waits and tasks[0].done() and not tasks[0].cancelled() else "never"
    alive = "yes" if starts == 0 else f"no, {starts} died"
    print(
        f"| {bomb.name} | {took if answer else float('inf'):.1f} | {shown(answer)} | {alive} | {longest} |", flush=True
    )
    return worker


async def ask(pool: Stage, query: str, seconds: float | None) -> Response | None:
    """The answer, or None when there is none for a long time."""
    headers = {} if seconds is None else {"x-deadline": int((time.time() + seconds) * 1000)}
    with contextlib.suppress(TimeoutError):
        return await pool.caller.call("/sql", {"query": query}, headers=headers)
    return None


def shown(answer: Response | None) -> str:
    if answer is None:
        return "no answer"
    if answer.status != "error":
        return str(answer.status)
    error = json.loads(answer.body)["error"]
    return f"error {error['code']}: {error['message'][:110]}".replace("|", "/")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

"""How long others wait while three requests of the same key kill every worker that runs them. Prints JSON.

    PYTHONPATH=tests/acceptance:tests/integration python -m tests.benchmarks.killers [SECONDS]

A real daemon with subprocess workers on a RabbitMQ of its own. A caller asks every quarter of a second; the three
deadly requests are sent first.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from daemon_process import DaemonProcess
from durable_caller import durable_caller

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker

DEADLY = 3
INTERVAL = 0.25
POOL = "bench_killers"


async def main(seconds: float) -> dict[str, object]:
    async with EmbeddedBroker() as broker:
        with tempfile.TemporaryDirectory() as directory:
            daemon = DaemonProcess(
                Path(directory),
                amqp_uri=broker.amqp_uri,
                management_uri=broker.management_uri,
                pool=POOL,
                settings={"log": {"level": "info"}},
            )
            try:
                await daemon.start()
                return await _measure(broker.amqp_uri, seconds)
            finally:
                await daemon.close()


async def _measure(uri: str, seconds: float) -> dict[str, object]:
    waits: list[float] = []
    async with durable_caller(uri, POOL) as caller:
        await caller.info("k")
        deadly = [await caller.send("k", "/crash", {"unless": f"/never/{number}"}) for number in range(DEADLY)]

        async def ask() -> None:
            began = time.perf_counter()
            await caller.answer(await caller.send("k", "/info", {}))
            waits.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            for _ in range(int(seconds / INTERVAL)):
                group.create_task(ask())
                await asyncio.sleep(INTERVAL)
        answered = [str((await caller.answer(one)).status) if one in caller.answers else None for one in deadly]
    return {"others": len(waits), "longest_wait_s": max(waits), "median_wait_s": median(waits), "deadly": answered}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))) + "\n")

"""Ways in which keys of a Spark process misbehave, again and again until `ended`: for a test and a benchmark."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.statuses import Status
from osrdyne_worker.runtime.exit import ExitCode
from tests.integration.pooled_stage import PooledStage
from tests.integration.worker_process import WorkerProcess
from tests.spark_fixtures import SHORT_LIVED

APP = "tests.spark_starts.isolation_app:app"
SPARK = {
    "master": "local[2]",
    "conf": {
        "spark.driver.memory": "1500m",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
        "spark.sql.shuffle.partitions": 1,
        "spark.ui.enabled": False,
    },
}


def settings(key: str, *, behaviour: str | None = None, **runtime: Any) -> dict[str, Any]:
    return {"config": {"name": key, "behaviour": behaviour}, "spark": SPARK, "runtime": runtime}


def document(response: Response) -> Any:
    assert response.status == Status.OK, response
    return json.loads(response.body)


def deadline(seconds: float) -> dict[str, int]:
    return {DEADLINE_HEADER: int((time.time() + seconds) * 1000)}


@dataclass(frozen=True)
class Culprit:
    """A key that misbehaves."""

    pooled: PooledStage
    process: WorkerProcess
    key: str
    ended: asyncio.Event

    async def assign(self, *, running: bool = True, **given: Any) -> WorkerId:
        return await self.pooled.assign(self.process, self.key, **settings(self.key, **given), running=running)

    async def call(self, path: str, body: object = b"", **fields: Any) -> Response:
        return await self.pooled.call(self.key, path, body, **fields)

    async def release(self, worker: WorkerId) -> None:
        exited = await self.pooled.release(self.process, worker)
        assert exited.exit is not None
        assert exited.exit.code == ExitCode.STOPPED, exited

    async def repeat(self, step: Callable[[int], Awaitable[object]]) -> None:
        """At least once."""
        for number in count():
            await step(number)
            if self.ended.is_set():
                return

    async def until_given_up(self, path: str, *, expires: float) -> None:
        """A handler that never ends: its own worker exits, and leaves a thread behind."""
        worker = await self.assign(stuck_grace=1.0, blocked_timeout=5.0)
        exit_of_it = asyncio.create_task(self.pooled.until_exited(self.process, worker))
        while not exit_of_it.done():
            # On a slow machine the deadline may pass before the handler runs: then it has not blocked.
            await self.pooled.send(self.key, path, headers=deadline(expires))
            await asyncio.wait({exit_of_it}, timeout=20.0)
        exited = await exit_of_it
        assert exited.exit is not None
        assert exited.exit.code == ExitCode.UNRECOVERABLE, exited


async def block_their_loop(one: Culprit) -> None:
    """A coroutine that does not return to the event loop: `blocked_timeout` ends its worker."""
    await one.until_given_up("/block_loop", expires=30.0)


async def hang(one: Culprit) -> None:
    """A plain handler that does not end: `stuck_grace` after its deadline ends its worker."""
    await one.until_given_up("/block", expires=5.0)


async def scan(one: Culprit) -> None:
    await one.assign()

    async def ask(number: int) -> None:
        assert (await one.call("/scan", headers=deadline(4.0))).status == Status.EXPIRED

    await one.repeat(ask)


async def hog_memory(one: Culprit) -> None:
    """30 MB in memory, of which each request makes a copy."""
    worker = await one.assign(behaviour="loads 30 MB")

    async def ask(number: int) -> None:
        assert document(await one.call("/hog")) > 30 * 10**6

    await one.repeat(ask)
    await one.release(worker)


async def stop_spark(one: Culprit) -> None:
    await one.assign()

    async def ask(number: int) -> None:
        refused = await one.call("/stop", {"number": number})
        assert json.loads(refused.body)["error"]["code"] == "stop_refused", refused

    await one.repeat(ask)


async def fail(one: Culprit) -> None:
    """Exceptions, `SystemExit` among them, of handlers and coroutines."""
    await one.assign()

    async def ask(number: int) -> None:
        failed = await one.call(("/raise", "/raise_in_loop")[number % 2], {"number": number // 2})
        assert failed.status == Status.ERROR, failed

    await one.repeat(ask)


async def fail_to_start(one: Culprit) -> None:
    """`on_start` raises, as often as the leader would try it, or never ends, until the release cuts it off."""

    async def start(number: int) -> None:
        worker = await one.assign(behaviour="fails", running=False)
        exited = await one.pooled.until_exited(one.process, worker)
        assert exited.exit is not None
        assert exited.exit.code == ExitCode.START_FAILED, exited
        assert f"there is no data for {one.key}" in str(exited.exit.reason)

    await one.repeat(start)
    worker = await one.assign(behaviour="blocks", running=False)
    await one.pooled.release(one.process, worker, grace=1.0)


async def leak(one: Culprit) -> None:
    """Views and cached data that stay until the key is released."""

    async def live(number: int) -> None:
        worker = await one.assign()
        assert document(await one.call("/leak", {"views": 100, "cached": 5})) == 106
        await one.release(worker)

    await one.repeat(live)


async def flood(one: Culprit) -> None:
    """Answers of 8 MB."""
    await one.assign()

    async def ask(number: int) -> None:
        assert len((await one.call("/flood")).body) == 2**23

    await one.repeat(ask)


Way = Callable[[Culprit], Awaitable[None]]
WAYS: tuple[Way, ...] = (scan, hog_memory, stop_spark, fail, leak, flood, fail_to_start, block_their_loop, hang)
"""The last ones leave threads behind."""
EACH = 6
"""Keys that misbehave together."""

"""Isolation of the keys of one Spark process: fifty keys, ten thousand random requests, and keys that misbehave.

The values that each key must return are kept here: a model of the key. `OSRDYNE_SEED=7` draws other requests.
"""

import asyncio
import json
import os
import time
from random import Random
from typing import Any

import pytest

from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import Response
from osrdyne.protocol.pooled import AssignmentState, ReportState
from osrdyne.protocol.statuses import Status
from osrdyne_worker.pooled.process import MAX_LEFT_BEHIND
from osrdyne_worker.runtime.exit import ExitCode
from tests.integration.pooled_stage import PooledStage, pooled_stage
from tests.integration.worker_process import PATIENCE, WorkerProcess
from tests.spark_fixtures import SHORT_LIVED

pytestmark = pytest.mark.nightly

APP = "tests.spark_starts.isolation_app:app"
SEED = int(os.environ.get("OSRDYNE_SEED", "50"))
KEYS = [f"key {number} é" for number in range(50)]
REQUESTS = 10_000
PLACES = {"state": 60, "setting": 20, "view": 15, "function": 5}
"""Where a value is kept, and how often it is written or read there: planning a query takes some milliseconds."""
WRITES = 0.3
SPARK = {
    "master": "local[2]",
    "conf": {
        "spark.driver.memory": "1500m",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
        "spark.sql.shuffle.partitions": 1,
        "spark.ui.enabled": False,
    },
}


@pytest.fixture
async def pooled(broker, pool_id):
    async with pooled_stage(broker.amqp_uri, pool_id) as made:
        yield made


def document(response: Response) -> Any:
    assert response.status == Status.OK, response
    return json.loads(response.body)


def settings(key: str, *, behaviour: str | None = None, **runtime: Any) -> dict[str, Any]:
    return {"config": {"name": key, "behaviour": behaviour}, "spark": SPARK, "runtime": runtime}


class OneKey:
    """Sends the requests of one key, one after the other, and compares each answer with what the key must have."""

    def __init__(self, pooled: PooledStage, key: str) -> None:
        self._pooled = pooled
        self._key = key
        self._random = Random(f"{SEED} {key}")
        self._expected = dict.fromkeys(PLACES, f"first of {key}")

    async def ask(self, times: int) -> None:
        for number in range(times):
            [place] = self._random.choices(list(PLACES), list(PLACES.values()))
            if self._random.random() < WRITES:
                self._expected[place] = f"{self._key} {number}"
                await self._call("/write", {"place": place, "value": self._expected[place]}, {})
            else:
                body = {"place": place, "own_session": self._random.random() < 0.5}
                await self._call("/read", body, {"value": self._expected[place]})

    async def ask_everything(self) -> None:
        """Read every place once more, and the Python function that `on_start` has registered."""
        expected = {**self._expected, "python": f"python of {self._key}"}
        for place, value in expected.items():
            await self._call("/read", {"place": place}, {"value": value})
        views = document(await self._pooled.call(self._key, "/views"))
        assert views["views"] == ["own"], (SEED, self._key)

    async def _call(self, path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
        header = f"{self._key.encode().hex()} {self._random.random()}"
        answer = document(await self._pooled.call(self._key, path, body, headers={"x-test": header}))
        assert answer == {"keys": [self._key] * 3, "header": header, **expected}, (SEED, self._key, path, body)


async def fail_to_start(pooled: PooledStage, process: WorkerProcess) -> None:
    """Its `on_start` raises, again and again, as often as the leader would try it."""
    for _ in range(5):
        worker = await pooled.assign(process, "fails", **settings("fails", behaviour="fails"), running=False)
        exited = await pooled.until_exited(process, worker)
        assert exited.exit is not None
        assert exited.exit.code == ExitCode.START_FAILED
        assert "there is no data for fails" in str(exited.exit.reason)


async def load_much(pooled: PooledStage, process: WorkerProcess) -> None:
    """It has 500 MB in memory, and gives them back."""
    worker = await pooled.assign(process, "loads", **settings("loads", behaviour="loads 500 MB"))
    assert document(await pooled.call("loads", "/views"))["views"] == ["heavy", "own"]
    await release(pooled, process, worker)


async def leak_views(pooled: PooledStage, process: WorkerProcess) -> None:
    worker = await pooled.assign(process, "leaks", **settings("leaks"))
    assert document(await pooled.call("leaks", "/leak", {"views": 300, "cached": 10})) == 311
    await release(pooled, process, worker)


async def block_handlers(pooled: PooledStage, process: WorkerProcess) -> None:
    """Its handler never ends: its own worker exits after `stuck_grace`, and leaves a thread behind."""
    worker = await pooled.assign(process, "blocks", **settings("blocks", stuck_grace=1.0))
    exit_of_it = asyncio.create_task(pooled.until_exited(process, worker))
    while not exit_of_it.done():
        # On a slow machine the deadline may pass before the handler runs: then it has not blocked.
        await pooled.send("blocks", "/block", headers={DEADLINE_HEADER: int((time.time() + 5.0) * 1000)})
        await asyncio.wait({exit_of_it}, timeout=20.0)
    exited = await exit_of_it
    assert exited.exit is not None
    assert exited.exit.code == ExitCode.UNRECOVERABLE


async def block_on_start(pooled: PooledStage, process: WorkerProcess) -> None:
    """Its `on_start` never ends: the release cuts it off."""
    worker = await pooled.assign(process, "waits", **settings("waits", behaviour="blocks"), running=False)
    exited = await pooled.release(process, worker, grace=1.0)
    assert exited.state is AssignmentState.EXITED


async def release(pooled: PooledStage, process: WorkerProcess, worker: Any) -> None:
    exited = await pooled.release(process, worker)
    assert exited.exit is not None
    assert exited.exit.code == ExitCode.STOPPED


MISBEHAVING = (fail_to_start, load_much, leak_views, block_handlers, block_on_start)


@pytest.mark.timeout(900)
@pytest.mark.proves("pooled/one-key-process-fails")
async def test_fifty_keys_of_one_process_answer_from_their_own_and_harm_no_other(pooled):
    print(f"seed {SEED}")
    process = await pooled.start(APP, spark=SPARK)
    workers = await asyncio.gather(*(pooled.assign(process, key, **settings(key)) for key in KEYS))
    keys = [OneKey(pooled, key) for key in KEYS]
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(key.ask(REQUESTS // len(KEYS)))
        for misbehave in MISBEHAVING:
            group.create_task(misbehave(pooled, process))
    print(f"requests answered after {time.monotonic() - began:.0f} s")
    await asyncio.gather(*(key.ask_everything() for key in keys))

    # All workers of the other keys are the ones that began, and the process has room for more.
    state = await pooled.ask(process, ReportState("last"))
    running = [one.worker_id for one in state.assignments if one.state is AssignmentState.RUNNING]
    assert sorted(running) == sorted(workers)
    assert not state.draining
    assert len(MISBEHAVING) < MAX_LEFT_BEHIND
    async with asyncio.timeout(PATIENCE):
        # What the released keys had in memory is gone; Spark removes it in a thread of its own.
        while document(await pooled.call(KEYS[0], "/views"))["in_memory"]:
            await asyncio.sleep(0.1)

"""Isolation of the keys of one Spark process: random requests to many keys, beside keys that misbehave.

The values that each key must return are kept here: a model of the key. `OSRDYNE_SEED=7` draws other requests.
"""

import asyncio
import os
from random import Random
from typing import Any

import pytest

from osrdyne.protocol.pooled import AssignmentState, ReportState
from tests.integration.pooled_stage import PooledStage, pooled_stage
from tests.integration.worker_process import PATIENCE
from tests.spark_starts.misbehaving import APP, EACH, SPARK, WAYS, Culprit, deadline, document, settings

pytestmark = pytest.mark.nightly

SEED = int(os.environ.get("OSRDYNE_SEED", "50"))
KEYS = [f"key {number} é" for number in range(24)]
REQUESTS = 60
"""Of each key."""
EXPIRY = 60.0
PLACES = {"state": 60, "setting": 20, "view": 15, "function": 5}
"""Where a value is kept, and how often it is written or read there: planning a query takes some milliseconds."""
WRITES = 0.3


@pytest.fixture
async def pooled(broker, pool_id):
    async with pooled_stage(broker.amqp_uri, pool_id) as made:
        yield made


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
        answer = document(
            await self._pooled.call(self._key, path, body, headers={"x-test": header, **deadline(EXPIRY)})
        )
        assert answer == {"keys": [self._key] * 3, "header": header, **expected}, (SEED, self._key, path, body)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.proves("pooled/one-key-process-fails")
async def test_keys_of_one_process_answer_from_their_own_beside_six_that_misbehave(way, pooled):
    print(f"seed {SEED}")
    process = await pooled.start(APP, spark=SPARK)
    workers = await asyncio.gather(*(pooled.assign(process, key, **settings(key)) for key in KEYS))
    keys, ended = [OneKey(pooled, key) for key in KEYS], asyncio.Event()
    async with asyncio.TaskGroup() as group:
        culprits = [Culprit(pooled, process, f"culprit {number}", ended) for number in range(EACH)]
        misbehaving = [group.create_task(way(one)) for one in culprits]
        await asyncio.gather(*(key.ask(REQUESTS) for key in keys))
        for key in keys:  # one after the other: each starts a process of Python
            await key.ask_everything()
        ended.set()
        await asyncio.gather(*misbehaving)

    # All workers of the other keys are the ones that began, and the process has room for more.
    state = await pooled.ask(process, ReportState("last"))
    running = {one.worker_id for one in state.assignments if one.state is AssignmentState.RUNNING}
    assert set(workers) <= running
    assert not state.draining
    async with asyncio.timeout(PATIENCE):
        # What the released keys had in memory is gone; Spark removes it in a thread of its own.
        while document(await pooled.call(KEYS[0], "/views"))["in_memory"]:
            await asyncio.sleep(0.1)

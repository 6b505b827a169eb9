"""A real pooled process with the SQL pipeline: many keys over one Spark, asked through a real RabbitMQ."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spark_fixtures import SMALL_SPARK

from osrdyne.protocol.activity import PROCESS_START_PARTS
from osrdyne.protocol.messages import Response
from osrdyne.protocol.pooled import ReportState
from osrdyne.protocol.statuses import Status
from osrdyne_worker.runtime.exit import ExitCode

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("java")]

KEYS = ["a", "b", "c", "d", "e"]
SLOW = "select count(*) from range(0, 100000000000, 1, 1) where id % 7 = 8"


@pytest.fixture
def config(tmp_path):
    """A table for each key, with the name of the key in it."""
    for number, key in enumerate(KEYS):
        (tmp_path / key).mkdir()
        pq.write_table(pa.table({"name": [key], "number": [number]}), tmp_path / key / "t.parquet")
    return {
        "datasets": [{"key": "{k}", "tables": [{"view": "t", "path": f"{tmp_path}/{{k}}/t.parquet", "cache": True}]}]
    }


def rows(response: Response) -> Any:
    assert response.status == Status.OK, response
    return json.loads(response.body)["rows"]


@pytest.mark.proves("pooled/jvm-process-ends-during")
async def test_keys_of_one_spark_answer_from_their_own_data_until_it_dies(pooled, config):
    process = await pooled.start("osrdyne_worker.pipelines.sql:app", config=config, spark=SMALL_SPARK)

    def settings(**runtime: Any) -> dict[str, Any]:
        return {"config": config, "spark": SMALL_SPARK, "runtime": {"concurrency": 2, **runtime}}

    assigned = await asyncio.gather(*(pooled.assign(process, key, **settings()) for key in KEYS))
    workers = dict(zip(KEYS, assigned, strict=True))
    missing = await pooled.assign(process, "nothing", **settings())  # an answer, not a failed start

    # A query that does not end is cancelled at its deadline; the other keys' queries beside it are answered.
    slow = {key: await pooled.send(key, "/sql", {"query": SLOW}, expiration=limit) for key, limit in (("a", "3000"),)}
    for _ in range(3):
        asked = {key: await pooled.send(key, "/sql", {"query": "select name, number from t"}) for key in KEYS}
        for number, (key, correlation_id) in enumerate(asked.items()):
            assert rows(await pooled.stage.caller.answer(correlation_id)) == [[key, number]]
    assert (await pooled.stage.caller.answer(slow["a"])).status == Status.EXPIRED
    refused = await pooled.call("nothing", "/sql", {"query": "select 1"})
    assert json.loads(refused.body)["error"]["code"] == "dataset_not_found"

    state = await pooled.ask(process, ReportState("memory"))
    assert set(state.cold_start) == set(PROCESS_START_PARTS)
    assert len(state.assignments) == len(workers) + 1
    # The process takes these figures every few seconds, and a busy JVM may not answer in time.
    for number in itertools.count():
        if state.memory.heap_used is not None and state.executor_seconds:
            break
        await asyncio.sleep(0.5)
        state = await pooled.ask(process, ReportState(f"memory-{number}"))
    assert 0 < state.memory.heap_used < state.memory.heap_max
    for worker in (missing, workers["b"]):
        assert (await pooled.release(process, worker)).exit.code == ExitCode.STOPPED
    assert rows(await pooled.call("c", "/sql", {"query": "select name from t"})) == [["c"]]

    # The JVM dies under running queries: the process ends and says why, and RabbitMQ has the requests of all keys.
    for key in ("a", "c", "d"):
        await pooled.send(key, "/sql", {"query": SLOW})
    await pooled.until_waiting(0, "a", "c", "d")
    [jvm] = [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "java"]
    jvm.send_signal(signal.SIGKILL)
    assert await process.wait() == ExitCode.UNRECOVERABLE
    await pooled.until_waiting(1, "a", "c", "d")
    assert any("session" in line and "gone" in line for line in process.lines)

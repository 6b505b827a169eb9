"""Queries that are made to exhaust a worker: each is answered by its deadline, others are served, the worker lives.

One real worker process with Spark and room for two requests, asked through a real RabbitMQ.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio

from osrdyne.protocol.activity import REQUESTS_FIELD, Event
from osrdyne.protocol.messages import Response
from osrdyne.protocol.statuses import Status
from osrdyne_worker.runtime.exit import ExitCode
from tests.integration.worker_process import PATIENCE, Stage, WorkerProcess, stage
from tests.security.query_bombs import BOMBS, FORGED_SKETCHES, HONEST, NOT_INTERRUPTED
from tests.spark_fixtures import SHORT_LIVED, SMALL_SPARK

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900), pytest.mark.usefixtures("java")]

CONF = {
    "spark.driver.memory": "640m",
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.driver.maxResultSize": "16m",
}
SPARK = {**SMALL_SPARK, "conf": {**SMALL_SPARK["conf"], **CONF}}
SOON = 2.0
EVALUATING = 5.0
"""Seconds until the deadline of a query that must have reached the optimiser by then."""
SOME_TIME = 60.0
"""Seconds until the deadline of a query that a full heap may keep from its answer."""


class Key:
    """The worker of one key, and its callers."""

    def __init__(self, pool: Stage, worker: WorkerProcess) -> None:
        self.pool = pool
        self.worker = worker

    async def ask(self, query: str, *, seconds: float | None = None) -> Response:
        """The answer. Fails as soon as the worker has ended, for there is no daemon that would replace it."""
        headers = {} if seconds is None else {"x-deadline": int((time.time() + seconds) * 1000)}
        asked = asyncio.create_task(self.pool.caller.call("/sql", {"query": query}, headers=headers))
        ended = asyncio.create_task(self.worker.process.wait())
        await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not asked.done():
            asked.cancel()
            await self.worker.wait()
            raise WorkerEndedError("\n".join(self.worker.lines[-20:]))
        return asked.result()

    async def answers_others(self, *, seconds: float | None = None) -> None:
        """Another caller is served by the same worker."""
        response = await self.ask(f"select count(*) + {secrets.randbelow(10**9)} as n from region", seconds=seconds)
        assert response.status == Status.OK
        assert self.worker.process.returncode is None


class WorkerEndedError(Exception):
    """The worker has ended; the message is what it wrote last."""


@asynccontextmanager
async def serving(broker: Any, directory: Path, **runtime: float) -> AsyncIterator[Key]:
    """One key and its worker, with room for two requests. The worker is killed at the end, whatever runs in it."""
    path = directory / "region.parquet"
    pq.write_table(pa.table({"r_regionkey": range(5), "r_name": [f"region {n}" for n in range(5)]}), path)
    config = {"datasets": [{"key": "k", "tables": [{"view": "region", "path": str(path)}]}]}
    async with stage(broker.amqp_uri, f"b{secrets.token_hex(6)}") as pool:
        worker = await pool.start(
            app="osrdyne_worker.pipelines.sql:app",
            runtime={"concurrency": 2, "stuck_grace": 300, "stray_timeout": 300, **runtime},
            spark=SPARK,
            config=config,
        )
        yield Key(pool, worker)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key(broker, tmp_path_factory):
    async with serving(broker, tmp_path_factory.mktemp("bombs")) as served:
        yield served


@pytest.fixture
def stuck_grace():
    """Seconds that a cancelled query of `short_lived_key` may run on."""
    return 3600.0


@pytest_asyncio.fixture(loop_scope="module")
async def short_lived_key(broker, tmp_path, stuck_grace):
    """A key whose worker ends with the test: it may be left with work that never ends. Its JVM ends with it."""
    async with serving(broker, tmp_path, stuck_grace=stuck_grace) as served:
        children = psutil.Process(served.worker.pid).children(recursive=True)
        assert children
        yield served
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE)
    for process in alive:
        process.kill()
    assert not alive


def error_of(response: Response) -> Mapping[str, Any]:
    assert response.status == Status.ERROR, response.body[:500]
    found: Mapping[str, Any] = json.loads(response.body)["error"]
    return found


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.name)
@pytest.mark.proves("spark/query-needs-more-memory")
async def test_bomb_is_refused_by_its_limit_before_anything_is_evaluated(key, bomb):
    error = error_of(await key.ask(bomb.query))
    assert error.get("setting") == bomb.setting, error
    assert bomb.setting in error["message"]
    assert f"{error['limit']:,}" in error["message"]
    assert key.worker.process.returncode is None


@pytest.mark.parametrize("query", FORGED_SKETCHES.values(), ids=FORGED_SKETCHES)
@pytest.mark.proves("spark/sketch-in-a-query")
async def test_sketch_that_the_query_brings_is_refused(key, query):
    assert error_of(await key.ask(query))["code"] == "function_not_allowed"
    assert key.worker.process.returncode is None


@pytest.mark.parametrize("query", HONEST.values(), ids=HONEST)
async def test_harmless_query_with_a_limited_function_is_answered(key, query):
    response = await key.ask(query)
    assert response.status == Status.OK, response.body


@pytest.mark.proves("spark/query-takes-too-long")
async def test_bomb_of_time_is_answered_at_its_deadline_and_others_are_served(key):
    """It has one task: more would only take processor time from the other tests of the run."""
    query = "select count(*) from range(0, 100000, 1, 1) a cross join range(0, 100000, 1, 1) b where a.id * b.id = -9"
    asked = asyncio.create_task(key.ask(query, seconds=SOON))
    await asyncio.sleep(0.5)
    await key.answers_others()
    assert (await asked).status == Status.EXPIRED
    await key.answers_others()


@pytest.mark.proves("spark/query-takes-too-long")
async def test_constant_that_cannot_be_cancelled_is_answered_at_its_deadline(short_lived_key):
    """Spark's optimiser evaluates the constant, which takes hours on any machine, and cannot be interrupted."""
    key = short_lived_key
    await key.answers_others()  # Spark has loaded its classes: the deadline falls into the evaluation
    asked = asyncio.create_task(key.ask(NOT_INTERRUPTED, seconds=EVALUATING))
    await asyncio.sleep(0.5)
    await key.answers_others()
    assert (await asked).status == Status.EXPIRED
    await key.answers_others()
    # The worker reports that the evaluation goes on, long after its answer; it does not take the place of others.
    busy = key.pool.events(key.worker).count(Event.BUSY)
    report = await key.pool.until_reported(key.worker, Event.BUSY, times=busy + 1)
    assert report.details["in_flight"] == 1
    assert report.details[REQUESTS_FIELD]
    await key.answers_others()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "query",
    [
        "select size(collect_list(repeat(string(id), 1000))) as v from range(0, 3000000, 1, 1)",
        "select max(length(repeat('x', int(id + 1000000000)))) as v from range(0, 2, 1, 2)",
    ],
    ids=["rows", "values"],
)
@pytest.mark.parametrize("stuck_grace", [10.0])
@pytest.mark.proves("spark/request-fills-spark-s")
async def test_bomb_of_memory_is_answered_and_the_worker_lives_or_names_the_cause(short_lived_key, query):
    """A full heap fails whichever thread allocates next. Mostly this is the task of the query, which is answered with
    the cause. If it is a thread of Spark, the worker ends with the cause. If it is the thread that connects Python and
    Java, requests are answered at their deadlines, and the worker ends because they run on."""
    key = short_lived_key
    await key.answers_others()
    try:
        answer = await key.ask(query, seconds=SOME_TIME)
        if answer.status != Status.EXPIRED:
            error = error_of(answer)
            assert error["code"] == "out_of_memory"
            assert "memory" in error["message"]
        async with asyncio.timeout(PATIENCE):
            while True:
                with suppress(AssertionError):  # Java has not yet collected what the query has left
                    return await key.answers_others(seconds=SOME_TIME)
                await asyncio.sleep(0.5)
    except WorkerEndedError as ended:
        causes = ("Spark's Java process ran out of memory", "did not end when it was cancelled")
        assert any(cause in str(ended) for cause in causes)
        assert await key.worker.wait() == ExitCode.UNRECOVERABLE


@pytest.mark.proves("spark/answer-exceeds-limit-worker")
async def test_answer_beyond_the_limit_is_refused_while_it_is_collected(key):
    error = error_of(await key.ask("select repeat(string(id), 2000) as v from range(0, 2500, 1, 25)"))
    assert error["code"] == "answer_too_large"
    assert "spark.driver.maxResultSize" in error["message"]
    await key.answers_others()

"""Real pooled processes with the SQL pipeline, asked through a real RabbitMQ: many keys, and files that change."""

import asyncio
import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from broker_api import until
from pooled_stage import PooledStage
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

    def settings(**runtime):
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


class Data:
    """A directory of Parquet files with the column `n`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = 0
        self.replace(1)

    def write(self, directory: Path, **columns: list[Any]) -> None:
        self.files += 1
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f".part-{self.files}"
        pq.write_table(pa.table(columns), unfinished)
        unfinished.rename(directory / f"part-{self.files}.parquet")

    def add(self, *values: int) -> None:
        self.write(self.path, n=list(values))

    def replace(self, *values: int, **columns: list[Any]) -> None:
        """Another directory in place of this one, with other names of files."""
        successor = self.path.with_name(f"{self.path.name}-next")
        self.write(successor, **(columns or {"n": list(values)}))
        if self.path.exists():
            shutil.rmtree(self.path)
        successor.rename(self.path)


class Key:
    def __init__(self, pooled: PooledStage, key: str, data: Data) -> None:
        self.pooled, self.key, self.data = pooled, key, data

    async def ask(self, query: str = "select n from t order by n", **fields: Any) -> Response:
        return await self.pooled.call(self.key, "/sql", {"query": query}, **fields)

    async def rows(self, query: str = "select n from t order by n", **fields: Any) -> list[Any]:
        response = await self.ask(query, **fields)
        assert response.status == "ok", response.body
        return [row[0] for row in json.loads(response.body)["rows"]]

    async def error(self, query: str = "select n from t", **fields: Any) -> str:
        response = await self.ask(query, **fields)
        assert response.status == "error", response.body
        return str(json.loads(response.body)["error"]["code"])


async def assign(pooled: PooledStage, tmp_path: Path, **datasets: dict[str, Any]) -> dict[str, Key]:
    """A key for each dataset, all in one process. `table` are further settings of the table, the others its own."""
    keys = {name: Key(pooled, name, Data(tmp_path / name)) for name in datasets}
    config = {
        "datasets": [
            {
                "key": name,
                "tables": [{"view": "t", "path": str(tmp_path / name), **dataset.get("table", {})}],
                "watch": dataset.get("watch", False),
            }
            for name, dataset in datasets.items()
        ],
        "retry_missing_interval": 0,
    }
    process = await pooled.start("osrdyne_worker.pipelines.sql:app", config=config, spark=SMALL_SPARK)
    for name in datasets:
        await pooled.assign(process, name, config=config, spark=SMALL_SPARK, runtime={"concurrency": 2})
    return keys


def version(number: int) -> dict[str, object]:
    return {"headers": {"x-data-version": number}}


async def until_cached(key: Key, rows: int) -> None:
    """Until queries read the view from memory, in which it has so many rows."""

    async def is_cached() -> bool:
        response = await key.pooled.call(key.key, "/explain", {"query": "select n from t"})
        return "InMemory" in json.loads(response.body)["plan"] and len(await key.rows()) == rows

    await until(is_cached)


@pytest.mark.timeout(1200)
@pytest.mark.proves(
    "files/directory-view-half-written", "files/files-added-below-view", "files/files-view-replaced-removed"
)
async def test_data_that_changes_below_warm_workers_is_loaded_again(pooled, tmp_path):
    """One test: the start of Spark takes longest."""
    cached = {"table": {"cache": True}}
    plain = {"table": {"key_columns": ["n"]}}
    keys = await assign(
        pooled, tmp_path, plain=plain, watched={"watch": True}, hot={"watch": True, **cached}, named=cached
    )
    await files_that_are_replaced(keys["plain"])
    await files_that_are_watched(keys["watched"])
    await cached_data_that_is_watched(keys["hot"])
    await cached_data_with_versions_of_a_publisher(keys["named"])


async def files_that_are_replaced(plain: Key) -> None:
    data = plain.data
    assert await plain.rows() == [1]

    data.replace(2)
    response = await plain.ask()
    assert (json.loads(response.body)["rows"], response.headers.get("x-data-reloaded")) == ([[2]], True)
    again = await plain.ask()
    assert (json.loads(again.body)["rows"], "x-data-reloaded" in again.headers) == ([[2]], False)

    # In a batch.
    data.replace(3)
    found = await plain.pooled.call("plain", "/lookup", {"table": "t", "key": {"n": 3}})
    assert (json.loads(found.body)["rows"], found.headers.get("x-data-reloaded")) == ([[3]], True)

    # Another schema: a new column, and another type of a known one.
    data.replace(n=["a"], more=[7])
    assert await plain.rows("select more from t") == [7]
    assert await plain.rows() == ["a"]

    # While the directory is being replaced, nothing of it is served.
    shutil.rmtree(data.path)
    assert await plain.error() == "dataset_incomplete"
    (data.path / "_temporary").mkdir(parents=True)
    data.write(data.path, n=[4])
    assert await plain.error() == "dataset_incomplete"
    data.write(data.path, n=[5])
    (data.path / "_temporary").rmdir()
    assert await plain.rows() == [4, 5]

    # A query that fails by itself, over files that have not changed, is not run again.
    response = await plain.ask("select 1 / (n - 4) from t")
    assert json.loads(response.body)["error"]["code"] == "DIVIDE_BY_ZERO"
    assert "x-data-reloaded" not in response.headers


async def files_that_are_watched(watched: Key) -> None:
    # Files that are added are seen once a check is due.
    assert await watched.rows() == [1]
    watched.data.add(2)
    await until(watched.rows, equals=[1, 2])
    first = int((await watched.ask()).headers["x-data-version"])
    assert first >= int((watched.data.path / "part-2.parquet").stat().st_mtime * 1000)
    # A request that needs a version is checked at once; one that does not exist is refused.
    watched.data.add(3)
    newest = int((watched.data.path / "part-3.parquet").stat().st_mtime * 1000)
    assert await watched.rows(**version(max(newest, first + 1))) == [1, 2, 3]
    assert await watched.error(**version(2**62)) == "data_version_unavailable"


async def cached_data_that_is_watched(hot: Key) -> None:
    await until_cached(hot, 1)
    hot.data.add(2)
    await until(hot.rows, equals=[1, 2])
    await until_cached(hot, 2)
    # What is half written is not served: the former data stays.
    (hot.data.path / "_temporary").mkdir()
    hot.data.add(3)
    for _ in range(4):
        assert await hot.rows() == [1, 2]
        await asyncio.sleep(0.4)
    (hot.data.path / "_temporary").rmdir()
    await until(hot.rows, equals=[1, 2, 3])


async def cached_data_with_versions_of_a_publisher(named: Key) -> None:
    await until_cached(named, 1)
    named.data.add(2)
    assert await named.rows() == [1], "nothing has named a version"
    assert await named.rows(**version(1)) == [1, 2]
    await until_cached(named, 2)
    named.data.replace(7)
    assert await named.rows(**version(2)) == [7]

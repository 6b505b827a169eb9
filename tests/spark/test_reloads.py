"""A reload reads the files as they are then, whatever was cached of them before.

The general check is a random walk over keys that load, cache, query and reload data that is replaced meanwhile. Rows
hold the number of the version that wrote them, so an answer shows by itself how old it is.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from osrdyne.protocol.names import Key
from osrdyne_worker import App, Call, Context, DataChangedError
from osrdyne_worker.requests.data_versions import DataVersions
from osrdyne_worker.runtime.loading import Loader
from osrdyne_worker.runtime.settings import RuntimeSettings
from osrdyne_worker.spark.key_sessions import KeySparkSessions, LivingKeys
from tests.component.worker.worker_bench import Bench, status_of

Shape = Callable[[Any], Any]
Keep = Callable[[Any, Any], Any]


# --- what loads and requests do with the rows


def joined(frame: Any) -> Any:
    return frame.join(F.broadcast(frame.selectExpr("v as other").distinct()), F.col("v") == F.col("other")).select("v")


SHAPES: dict[str, Shape] = {
    "all": lambda frame: frame,
    "filtered": lambda frame: frame.where("v > 0"),
    "joined": joined,
}


def cache_table(session: Any, frame: Any) -> Any:
    frame.createOrReplaceTempView("kept")
    session.catalog.cacheTable("kept")
    return session.table("kept")


def cache_in_sql(session: Any, frame: Any) -> Any:
    frame.createOrReplaceTempView("source_of_kept")
    session.sql("drop view if exists kept_in_sql")
    session.sql("cache table kept_in_sql as select * from source_of_kept")
    return session.table("kept_in_sql")


KEEPS: dict[str, Keep] = {
    "nothing": lambda session, frame: frame,
    "cache": lambda session, frame: frame.cache(),
    "persist": lambda session, frame: frame.selectExpr("v").persist(),
    "cacheTable": cache_table,
    "cache in sql": cache_in_sql,
    "checkpoint": lambda session, frame: frame.cache().localCheckpoint(),
}


class Source:
    """Files, whose rows hold the number of the version that wrote them; `history`: the rows of each version."""

    def __init__(self, path: Path, format: str) -> None:
        self.path, self.format = path, format
        self.history: list[list[int]] = [[]]
        self.replace()

    @property
    def version(self) -> int:
        return len(self.history) - 1

    def read(self, session: Any, *, in_sql: bool = False) -> Any:
        if in_sql:
            files = f"{self.format} options (path '{self.path}')"
            session.sql(f"create or replace temporary view files (v long, day int) using {files}")
            return session.table("files").select("v")
        return session.read.format(self.format).schema("v long, day int").load(str(self.path)).select("v")

    def replace(self) -> None:
        """Each second version has a file of the same name as the one before."""
        number = len(self.history)
        shutil.rmtree(self.path, ignore_errors=True)
        self._write(self.path / "day=0", f"part-{number // 2}", [number] * 2)
        self.history.append([number] * 2)

    def add_partition(self) -> None:
        number = len(self.history)
        self._write(self.path / f"day={number}", "part", [number])
        self.history.append(sorted([*self.history[-1], number]))

    def _write(self, directory: Path, name: str, rows: list[int]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        table, path = pa.table({"v": rows}), directory / f"{name}.{self.format}"
        if self.format == "parquet":
            pq.write_table(table, path)
        else:
            pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(include_header=False))


# --- one key


class Shared:
    """The sessions of a dedicated worker, on the Spark that all tests share."""

    def __init__(self, sessions: Any, session: Any) -> None:
        self._sessions, self._session = sessions, session

    def build(self, context: Context) -> Any:
        return self._session.newSession()

    def close(self, session: Any) -> None:
        session.catalog.clearCache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sessions, name)


@dataclass(frozen=True)
class Load:
    """What `on_start` does: keep the rows that it reads, shape them, and keep the result."""

    in_sql: bool = False
    first: str = "nothing"
    shape: str = "all"
    last: str = "cache"

    def run(self, session: Any, source: Source) -> None:
        frame = KEEPS[self.first](session, source.read(session, in_sql=self.in_sql))
        KEEPS[self.last](session, SHAPES[self.shape](frame)).createOrReplaceTempView("t")
        session.table("t").count()  # in memory now


class OneKey(Bench):
    """The loading and the requests of one worker. `names_versions`: its application names the newest version."""

    def __init__(self, source: Source, sessions: Any, names_versions: bool, *arguments: Any) -> None:
        self.source, self.sessions, self.names_versions = source, sessions, names_versions
        self.load, self.completed, self._numbers = Load(), 0, count()
        """`completed`: the version of the files at the beginning of the last load that has ended."""
        super().__init__(*arguments)

    def make_app(self) -> App:
        self.app = app = App(sessions=self.sessions)
        app.on_start(lambda context: self.load.run(context.session, self.source))
        if self.names_versions:
            app.newest_version(lambda context: self.source.version)

        @app.handler("/rows")
        def rows(call: Call) -> list[int]:
            reads, shape, keep, session = json.loads(call.body)
            own = call.session if session == "own" else call.context.session
            try:
                frame = own.table("t") if reads == "view" else self.source.read(own)
                return sorted(row.v for row in KEEPS[keep](own, SHAPES[shape](frame)).collect())
            except Exception as error:
                if "FILE_NOT_EXIST" in str(error) or "FAILED_READ_FILE" in str(error):
                    raise DataChangedError("A file is gone.") from error
                raise

        return app

    async def begin(self, threads: ThreadPoolExecutor, name: str) -> None:  # type: ignore[override]
        await self.open()
        self.loader = Loader(self.app, Context(key=Key(name), pool="tests", worker_id=name), threads)
        self.processor.data = DataVersions(self.loader.context, self.loader, self.runtime)
        began = self.source.version
        self.processor.data.loaded(await self.loader.start())
        self.completed = began

    async def reload(self) -> None:
        """As `groups reload`."""
        began = self.source.version
        await self.processor.data.reload(forget=True)
        self.completed = began

    async def ask(self, *what: str, needs: int | None = None) -> str | None:
        """What is wrong with the answer; None if nothing is."""
        name, least = f"{next(self._numbers)}", max(self.completed, needs or 0)
        headers = {} if needs is None else {"x-data-version": needs}
        await self.run("/rows", body=json.dumps(what).encode(), correlation_id=name, **headers)
        [reply] = [one for one in self.replies() if one.correlation_id == name]
        if status_of(reply) != "ok":
            return reply.body.decode()
        rows, named = json.loads(reply.body), int(str(reply.headers.get("x-data-version", 0)))
        found = self.source.history.index(rows) if rows in self.source.history else -1
        if needs is not None or reply.headers.get("x-data-reloaded"):
            self.completed = max(self.completed, named)
        return None if found >= max(least, named) else f"rows {rows} as version {named}, loaded was {least}"


@asynccontextmanager
async def one_key(source: Source, sessions: Any, name: str, load: Load, names: bool = False) -> AsyncIterator[OneKey]:
    enter = getattr(sessions, "enter_thread", lambda: None)
    with ThreadPoolExecutor(4, initializer=enter) as threads:
        async with asyncio.TaskGroup() as group:
            key = OneKey(source, sessions, names, group, threads, RuntimeSettings(concurrency=2, stuck_grace=3600.0))
            key.load = load
            await key.begin(threads, name)
            yield key
            await key.finish()
            await key.loader.stop(started=True)


# --- the walk


@dataclass
class Walk:
    """Four keys of a pooled process, two of which read the same files; or a dedicated worker with the first of them."""

    dice: Random
    sessions_of: Callable[[], Any]
    sources: list[Source]
    steps: list[str] = field(default_factory=list)
    keys: list[OneKey] = field(default_factory=list)
    workers: list[AsyncExitStack] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    async def go(self, steps: int) -> None:
        for number in range(len(self.sources)):
            self.keys.append(await self.start(number))
        for _ in range(steps):
            number = self.dice.randrange(len(self.keys))
            step = self.dice.choices(list(STEPS), list(STEPS.values()))[0]
            await getattr(self, step)(number)
        for number in range(len(self.keys)):
            await self.query(number)

    def note(self, number: int, *step: object) -> None:
        self.steps.append(f"key {number}: {' '.join(map(str, step))}")

    def any_load(self) -> Load:
        first, last = self.dice.choices(list(KEEPS), k=2)
        return Load(self.dice.random() < 0.3, first, self.dice.choice(list(SHAPES)), last)

    async def start(self, number: int) -> OneKey:
        load, names = self.any_load(), self.dice.random() < 0.5
        self.note(number, "start", load, "names versions" if names else "")
        worker = AsyncExitStack()
        self.workers[number : number + 1] = [worker]
        key = one_key(self.sources[number], self.sessions_of(), f"{number}-{next(self.numbers)}", load, names)
        return await worker.enter_async_context(key)

    async def restart(self, number: int) -> None:
        await self.workers[number].aclose()
        self.keys[number] = await self.start(number)

    async def replace(self, number: int) -> None:
        change = self.dice.choice(("replace", "replace", "add_partition"))
        getattr(self.sources[number], change)()
        self.note(number, change, "version", self.sources[number].version)

    async def reload(self, number: int) -> None:
        key = self.keys[number]
        key.load = self.any_load()
        self.note(number, "reload", key.load)
        beside = [self.query(other) for other in range(len(self.keys)) if self.dice.random() < 0.3]
        await asyncio.gather(key.reload(), *beside)

    async def query(self, number: int, keep: str = "nothing", **needs: int) -> None:
        reads, session = self.dice.choice(("view", "view", "files")), self.dice.choice(("own", "shared"))
        what = (reads, self.dice.choice(list(SHAPES)), keep, session)
        self.note(number, "query", *what, needs or "")
        wrong = await self.keys[number].ask(*what, **needs)
        if wrong is not None:
            pytest.fail("\n".join([*self.steps, f"key {number}: {wrong}"]))

    async def keep(self, number: int) -> None:
        await self.query(number, self.dice.choice(list(KEEPS)))

    async def need(self, number: int) -> None:
        """A client names the newest version."""
        self.keys[number].load = self.any_load()
        await self.query(number, needs=self.sources[number].version)


STEPS = {"replace": 5, "reload": 4, "query": 3, "keep": 3, "need": 2, "restart": 1}
"""How often each is drawn."""


@pytest.fixture
def uncached(spark):
    """What a test caches does not stay."""
    yield
    spark.catalog.clearCache()


@pytest.fixture
def sessions_of_keys(sessions, spark, uncached):
    """Makes the session factory of one more key."""
    return partial(KeySparkSessions, sessions, spark, LivingKeys(spark))


@pytest.mark.parametrize("placement", ["dedicated", "pooled"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 100))])
async def test_no_answer_is_older_than_its_version(seed, placement, sessions, spark, sessions_of_keys, tmp_path):
    dice = Random(seed)
    x, y, z = (Source(tmp_path / name, dice.choice(("parquet", "csv"))) for name in "xyz")
    if placement == "dedicated":
        walk = Walk(dice, lambda: Shared(sessions, spark), [x])
    else:
        walk = Walk(dice, sessions_of_keys, [x, x, y, z])
    try:
        await walk.go(14)
    finally:
        for worker in walk.workers:
            await worker.aclose()


@pytest.mark.proves("pooled/other-key-caches-former-files")
@pytest.mark.parametrize("change", ["replace", "add_partition"])
@pytest.mark.parametrize("begins", ["reload", "start"])
@pytest.mark.parametrize("caches", ["before", "nested", "after"])
async def test_what_another_key_has_cached_of_the_former_files_is_not_used(
    change, begins, caches, sessions_of_keys, tmp_path
):
    """It has loaded the same path before, and caches before our load begins, or after it."""
    source, load = Source(tmp_path / "x", "parquet"), Load(shape="filtered", last="nothing")
    theirs = Load(first="cache" if caches == "nested" else "nothing", shape="filtered", last="cache")
    async with AsyncExitStack() as stack:
        other = one_key(source, sessions_of_keys(), "other", load if caches == "after" else theirs)
        other_key = await stack.enter_async_context(other)
        if begins == "reload":
            ours = await stack.enter_async_context(one_key(source, sessions_of_keys(), "ours", load))
        getattr(source, change)()
        if begins == "start":
            ours = await stack.enter_async_context(one_key(source, sessions_of_keys(), "ours", load))
        else:
            await ours.reload()
        if caches == "after":
            assert await other_key.ask("view", "all", "cache", "shared") is None
        assert await ours.ask("view", "all", "nothing", "own") is None


async def test_what_a_request_with_the_former_data_caches_is_not_used(sessions_of_keys, tmp_path):
    source, load = Source(tmp_path / "x", "parquet"), Load(last="nothing")
    async with one_key(source, sessions_of_keys(), "ours", load) as ours:
        former = ours.processor.data.context.session
        source.add_partition()
        await ours.reload()
        former.table("t").cache().count()
        assert await ours.ask("view", "all", "nothing", "own") is None


async def test_cached_data_of_the_same_files_is_shared_and_stays(sessions_of_keys, spark, tmp_path):
    def reads_memory(session):
        plan = session.table("t")._jdf.queryExecution().withCachedData()
        return "InMemoryRelation" in plan.toString()

    source, plain = Source(tmp_path / "x", "parquet"), Load(last="nothing")
    async with (
        one_key(source, sessions_of_keys(), "ours", Load(last="cacheTable")) as ours,
        one_key(source, sessions_of_keys(), "other", plain) as other,
    ):
        await other.reload()
        assert all(reads_memory(key.processor.data.context.session) for key in (ours, other))
    plain.run(spark, source)  # the first session of this Spark
    spark.table("t").cache()
    copy = spark.newSession()
    plain.run(copy, source)
    assert reads_memory(copy)
    spark.catalog.dropTempView("t")

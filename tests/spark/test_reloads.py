"""A reload reads the files as they are then, whatever the former load has cached of them."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osrdyne.protocol.names import Key
from osrdyne_worker import App, Context
from osrdyne_worker.runtime.loading import Loader
from osrdyne_worker.spark.cached_data import OWNER
from osrdyne_worker.spark.key_sessions import KeySparkSessions, LivingKeys

Load = Callable[[Any, str], None]


def cache(session: Any, path: str) -> None:
    session.read.parquet(path).cache().createOrReplaceTempView("t")


def cache_table(session: Any, path: str) -> None:
    session.read.parquet(path).createOrReplaceTempView("t")
    session.catalog.cacheTable("t")


def persist(session: Any, path: str) -> None:
    session.sql(f"create or replace temporary view files using parquet options (path '{path}')")
    session.table("files").selectExpr("v").persist().createOrReplaceTempView("t")


def cache_in_sql(session: Any, path: str) -> None:
    session.sql(f"create or replace temporary view t using parquet options (path '{path}')")
    session.sql("cache table t")


def checkpoint(session: Any, path: str) -> None:
    session.read.parquet(path).cache().localCheckpoint().createOrReplaceTempView("t")


def only_open(session: Any, path: str) -> None:
    session.read.parquet(path).createOrReplaceTempView("t")


LOADS: tuple[Load, ...] = (cache, cache_table, persist, cache_in_sql, checkpoint)


class Shared:
    """The sessions of a dedicated worker, on the Spark that all tests share."""

    def __init__(self, sessions: Any, session: Any) -> None:
        self._sessions, self._session = sessions, session

    def build(self, context: Context) -> Any:
        session = self._session.newSession()
        session.conf.set(OWNER, context.worker_id)
        return session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sessions, name)


class Data:
    """One key, whose data is a number in a Parquet file."""

    def __init__(self, sessions: Any, threads: ThreadPoolExecutor, path: Path, name: str) -> None:
        self.path, self.how = path, cache
        app = App(sessions=sessions)
        app.on_start(self._load)
        self.loader = Loader(app, Context(key=Key(name), pool="tests", worker_id=name), threads)
        self._sessions = sessions

    def _load(self, context: Context) -> None:
        self.how(context.session, str(self.path))
        context.session.table("t").count()  # in memory now

    def values(self) -> list[int]:
        """What a request reads."""
        session = self._sessions.request_session(self.loader.context.session)
        return sorted(row.v for row in session.table("t").collect())


def write(path: Path, *values: int, name: str = "part") -> None:
    path.mkdir(exist_ok=True)
    pq.write_table(pa.table({"v": list(values)}), path / f"{name}.parquet")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def uncached(spark):
    """What a test caches does not stay."""
    yield
    spark.catalog.clearCache()


@pytest.fixture(params=["dedicated", "pooled"])
def sessions_of(request, sessions, spark, uncached):
    """Makes the session factory of one more key."""
    if request.param == "dedicated":
        return lambda: Shared(sessions, spark)
    living = LivingKeys(spark)
    return lambda: KeySparkSessions(sessions, spark, living)


@pytest.mark.parametrize("how", LOADS)
async def test_reload_serves_the_replaced_files(how, sessions_of, threads, tmp_path):
    write(tmp_path / "d", 1)
    data = Data(sessions_of(), threads, tmp_path / "d", "one")
    data.how = how
    await data.loader.start()
    write(tmp_path / "d", 2, 3)
    assert data.values() == [1], "cached"
    await data.loader.reload(2)
    assert data.values() == [2, 3]


async def test_reload_finds_partitions_that_were_added(sessions_of, threads, tmp_path):
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "day=1", 1)
    data = Data(sessions_of(), threads, tmp_path / "d", "one")
    await data.loader.start()
    write(tmp_path / "d" / "day=2", 2)
    await data.loader.reload(2)
    assert data.values() == [1, 2]


async def test_frame_that_a_request_caches_is_not_used_by_the_next_load(sessions_of, threads, tmp_path):
    write(tmp_path / "d", 1)
    data = Data(sessions_of(), threads, tmp_path / "d", "one")
    data.how = only_open
    await data.loader.start()
    assert data.loader.context.session.table("t").cache().count() == 1
    write(tmp_path / "d", 2)
    await data.loader.reload(2)
    assert data.values() == [2]


async def test_frame_that_a_former_request_caches_after_the_reload_is_not_used(sessions_of, threads, tmp_path):
    write(tmp_path / "d", 1)
    data = Data(sessions := sessions_of(), threads, tmp_path / "d", "one")
    data.how = only_open
    await data.loader.start()
    former = sessions.request_session(data.loader.context.session)
    write(tmp_path / "d", 2, name="added")
    await data.loader.reload(2)
    assert former.table("t").cache().count() == 1, "it has listed one file"
    assert data.values() == [1, 2]


@pytest.mark.proves("pooled/other-key-caches-former-files")
async def test_what_another_key_caches_of_the_former_files_is_not_used(sessions, spark, uncached, threads, tmp_path):
    living = LivingKeys(spark)
    write(tmp_path / "d", 1)
    ours, other = (
        Data(KeySparkSessions(sessions, spark, living), threads, tmp_path / "d", name) for name in ("ours", "other")
    )
    for data in (ours, other):
        data.how = only_open
        await data.loader.start()
    own = other.loader.context.session.newSession()  # as a handler may make
    only_open(own, str(tmp_path / "d"))
    write(tmp_path / "d", 2, name="added")
    await ours.loader.reload(2)
    for session in (other.loader.context.session, own):
        assert session.table("t").cache().count() == 1, "it has listed one file"
    assert ours.values() == [1, 2]
    fresh = ours.loader.context.session.newSession()
    only_open(fresh, str(tmp_path / "d"))
    query = "select (select max(v) from t) where 2 in (select v from t)"
    assert [tuple(row) for row in fresh.sql(query).collect()] == [(2,)]


async def test_data_of_other_keys_stays_in_memory(sessions, spark, uncached, threads, tmp_path):
    living = LivingKeys(spark)
    for name in ("a", "b"):
        write(tmp_path / name, 1)
    ours, theirs = (
        Data(KeySparkSessions(sessions, spark, living), threads, tmp_path / name, name) for name in ("a", "b")
    )
    await ours.loader.start()
    await theirs.loader.start()
    await ours.loader.reload(2)
    assert theirs.loader.context.session.catalog.isCached("t")
    assert ours.loader.context.session.catalog.isCached("t")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 200))])
async def test_no_answer_is_older_than_its_version(seed, sessions, spark, uncached, threads, tmp_path):
    """Four keys of a pooled process, two of which read the same files. Each version adds a file with its number."""
    dice, living = random.Random(seed), LivingKeys(spark)
    versions = dict.fromkeys(("x", "y", "z"), 1)
    for name in versions:
        write(tmp_path / name, 1)
    keys = [
        Data(KeySparkSessions(sessions, spark, living), threads, tmp_path / name, f"key-{number}")
        for number, name in enumerate(("x", "x", "y", "z"))
    ]
    loaded: dict[Data, int] = {}
    for data in keys:
        data.how = dice.choice((*LOADS, only_open))
        await data.loader.start()
        loaded[data] = versions[data.path.name]
    for _ in range(12):
        data = dice.choice(keys)
        match dice.choice(("add", "add", "reload", "reload", "query", "cache")):
            case "add":
                versions[data.path.name] += 1
                write(data.path, version := versions[data.path.name], name=f"version-{version}")
            case "reload":
                data.how = dice.choice((*LOADS, only_open))
                await data.loader.reload(versions[data.path.name])
                loaded[data] = versions[data.path.name]
            case "cache":
                data.loader.context.session.table("t").cache()
        for one in keys:
            assert max(one.values()) >= loaded[one], (seed, one.loader.context.key)

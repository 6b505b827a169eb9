"""The sessions of several keys in one Spark: what each has for itself, and what remains after its release."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from asking import SLOW, active_jobs, wait_for

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.names import Key
from osrdyne_worker import Context, RequestError
from osrdyne_worker.pipelines.guard.sessions import REQUIRED_SETTINGS
from osrdyne_worker.pipelines.views.caching import cache_now, drop_cached
from osrdyne_worker.spark.java.heap import HeapUse, LiveHeap
from osrdyne_worker.spark.key_sessions import KeySparkSessions, LivingKeys
from osrdyne_worker.spark.session import SparkSessions
from osrdyne_worker.spark.task_times import PoolTimes

PARTITIONS = "spark.sql.shuffle.partitions"


class OneKey:
    """A key with its session and one thread, as in a pooled process."""

    def __init__(self, sessions: SparkSessions, shared: Any, living: LivingKeys, name: str) -> None:
        self.name = name
        self.numbers = count()
        self.factory = KeySparkSessions(sessions, shared, living)
        self.threads = ThreadPoolExecutor(2, initializer=self.factory.enter_thread)
        conf = {PARTITIONS: 3 if name == "a" else 5, "spark.sql.variable.substitute": True}
        self.context = Context(Key(name), worker_id=f"worker-{name}", worker_config={"spark": {"conf": conf}})
        self.session = self.threads.submit(self.factory.build, self.context).result()

    def submit(self, function: Callable[[Any], Any], *, group: str = "") -> Future[Any]:
        group = group or f"{self.name}-{next(self.numbers)}"
        return self.threads.submit(self.factory.run_in_group, self.session, group, lambda: function(self.session))

    def run(self, function: Callable[[Any], Any]) -> Any:
        return self.submit(function).result(timeout=240)

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        return self.run(lambda session: [tuple(row) for row in session.sql(query).collect()])  # type: ignore[no-any-return]

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.factory.close(self.session)


@pytest.fixture
def living(spark):
    return LivingKeys(spark)


@pytest.fixture
def own_patches(monkeypatch):
    """The other tests of this process use PySpark as it is."""
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkSession, "getActiveSession", SparkSession.getActiveSession)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", SparkSession.Builder.getOrCreate)


@pytest.fixture
def keys(sessions, spark, living, own_patches):
    made = (OneKey(sessions, spark, living, "a"), OneKey(sessions, spark, living, "b"))
    yield made
    spark.sparkContext.cancelAllJobs()
    for key in made:
        key.close()


def cached(spark: Any) -> int:
    return int(spark._jsparkSession.sharedState().cacheManager().numCachedEntries())


def test_views_functions_and_settings_of_the_same_name_are_each_keys_own(keys):
    for number, key in enumerate(keys):

        def prepare(session: Any, number: int = number, name: str = key.name) -> None:
            session.createDataFrame([(number, name)], "id int, name string").createOrReplaceTempView("data")
            session.udf.register("mine", lambda value: f"{name} {value}")

        key.run(prepare)
    for number, key in enumerate(keys):
        assert key.sql("select id, name, mine(name) from data") == [(number, key.name, f"{key.name} {key.name}")]
        assert key.sql(f"set {PARTITIONS}") == [(PARTITIONS, "3" if key.name == "a" else "5")]
        required = {name: value for name, value in REQUIRED_SETTINGS.items() if name.startswith("spark.sql.")}
        for name, value in required.items():
            assert key.run(lambda session, name=name: session.conf.get(name)) == value


def test_pyspark_knows_the_session_of_the_keys_thread(keys, spark):
    from pyspark.sql import SparkSession

    def known(session):
        made = SparkSession.builder.config(PARTITIONS, "7").getOrCreate()
        return SparkSession.getActiveSession() is session and SparkSession.active() is session and made is session

    spark.createDataFrame([(1,)], "id int")  # PySpark's active session of all threads is this one now
    a, b = keys
    assert a.run(known)
    assert a.sql(f"set {PARTITIONS}") == [(PARTITIONS, "7")]
    assert b.sql(f"set {PARTITIONS}") == [(PARTITIONS, "5")]
    of_no_key = SparkSession.getActiveSession()
    assert of_no_key is SparkSession.builder.getOrCreate()
    assert of_no_key not in (spark, a.session, b.session)


@pytest.mark.parametrize(
    "stop",
    [
        lambda session: session.stop(),
        lambda session: type(session).active().stop(),
        lambda session: session.sparkContext.stop(),
        lambda session: session.range(1).sparkSession.stop(),
        lambda session: session.__exit__(None, None, None),
    ],
    ids=["session", "active", "context", "frame", "with"],
)
def test_stop_of_one_keys_session_is_refused_and_ends_no_key(keys, stop):
    a, _ = keys
    with pytest.raises(RequestError) as refused:
        a.run(lambda session: stop(a.factory.request_session(session)))
    assert (refused.value.code, refused.value.error_code) == (500, "stop_refused")
    for key in keys:
        assert key.factory.is_alive(key.session)
        assert key.sql("select 1") == [(1,)]


def test_request_of_a_key_has_a_copy_of_its_session_and_jobs_in_its_pool(keys):
    def pool(session):
        return str(session.sparkContext.getLocalProperty("spark.scheduler.pool"))

    a, b = keys
    for key in keys:
        key.run(lambda session, name=key.name: session.sql(f"select '{name}' as name").createOrReplaceTempView("data"))
    assert a.run(lambda session: a.factory.request_session(session).table("data").first()[0]) == "a"
    assert b.sql("select name from data") == [("b",)]
    assert [key.run(pool) for key in keys] == ["key a", "key b"]


def test_cancel_of_one_key_leaves_the_jobs_of_another(keys, spark):
    a, b = keys
    running = [key.submit(lambda session: session.sql(SLOW).toArrow(), group=f"{key.name}-slow") for key in keys]
    wait_for(lambda: len(active_jobs(spark)) == 2)
    a.factory.cancel(a.session, "a-slow")
    assert running[0].exception(timeout=240) is not None
    wait_for(lambda: len(active_jobs(spark)) == 1)
    assert b.factory.progress(b.session, "b-slow")["jobs"] == 1
    assert not running[1].done()
    assert a.sql("select 1") == [(1,)]
    assert set(b.factory.stray_tasks(b.session)) == set()
    b.factory.cancel(b.session, "b-slow")
    assert running[1].exception(timeout=240) is not None


def test_release_drops_the_views_and_cached_data_of_the_key_only(keys, spark):
    a, b = keys
    before = cached(spark)
    for key in keys:

        def fill(session: Any, start: int = ord(key.name)) -> None:
            session.range(start, start + 10).createOrReplaceTempView("data")
            session.catalog.cacheTable("data")
            session.table("data").count()
            session.range(start, start + 20).cache().count()
            session.range(1000, 1010).createOrReplaceTempView("shared")
            session.catalog.cacheTable("shared")  # the plans of both keys are equal: one entry

        key.run(fill)
    assert cached(spark) == before + 5
    a.close()
    assert cached(spark) == before + 3
    assert [table.name for table in a.session.catalog.listTables() if table.isTemporary] == []
    assert b.sql("select count(*) from data") == [(10,)]
    assert b.run(lambda session: [session.catalog.isCached(view) for view in ("data", "shared")]) == [True, True]
    a.close()  # once more, after threads that were left behind
    b.close()
    assert cached(spark) == before


def test_cached_view_of_two_keys_stays_in_memory_when_one_of_them_drops_it(keys, spark, tmp_path):
    """A key that loads its data again drops the former data. Data with another filter is other data."""
    a, b = keys
    path = str(tmp_path / "trains.parquet")
    spark.range(10).write.parquet(path)
    before = cached(spark)

    def fill(session):
        trains = session.read.parquet(path)
        cache_now(session, "trains", trains, "signature")
        number = session.conf.get(PARTITIONS)  # of each key another one
        cache_now(session, "own", trains.where(f"id < {number}"), "signature")

    for key in keys:
        key.run(fill)
    assert cached(spark) == before + 3
    a.run(lambda session: drop_cached(session, ["trains", "own"]))
    assert cached(spark) == before + 2
    assert b.run(lambda session: [session.catalog.isCached(view) for view in ("trains", "own")]) == [True, True]
    b.run(lambda session: drop_cached(session, ["trains", "own"]))
    assert cached(spark) == before


def test_spark_connect_cannot_be_shared():
    context = Context(Key("pooled"), worker_config={"spark": {"master": "sc://localhost"}})
    with pytest.raises(ConfigurationError, match="Spark Connect address, which pooled workers cannot share"):
        SparkSessions().build_shared(context)


class FakeHeap:
    def __init__(self) -> None:
        self.live, self.garbage, self.collections = 10, 0, 0

    def use(self) -> HeapUse:
        return HeapUse(self.live + self.garbage, 100)

    def collect(self) -> None:
        self.collections += 1
        self.garbage = 0


def test_garbage_does_not_count_as_use_and_is_seldom_collected():
    heap, now = FakeHeap(), 0.0
    live = LiveHeap(heap, monotonic=lambda: now, sleep=lambda seconds: None)
    assert (live.use().used, heap.collections, live.live) == (10, 0, None)
    heap.garbage = 80
    assert (live.use().used, heap.collections, live.live) == (10, 2, 10)
    heap.garbage = 80
    assert (live.use().used, heap.collections) == (10, 2)
    now, heap.live = 61.0, 70
    assert (live.use().used, heap.collections, live.live) == (70, 4, 70)


def test_tasks_are_counted_for_the_key_that_runs_them(sessions, spark, living):
    sessions._pool_times = PoolTimes(spark)
    try:
        a, b = OneKey(sessions, spark, living, "timed"), OneKey(sessions, spark, living, "idle")
        before = sessions.executor_seconds(spark)
        a.sql("select sum(id) from range(0, 30000000, 1, 4)")
        wait_for(lambda: a.factory.executor_seconds(a.session) > 0)
        assert b.factory.executor_seconds(b.session) == 0
        # The application's figure contains those of all keys.
        wait_for(lambda: sessions.executor_seconds(spark) >= before + a.factory.executor_seconds(a.session))
        a.close()
        later = OneKey(sessions, spark, living, "timed")
        assert later.factory.executor_seconds(later.session) == 0
    finally:
        sessions._pool_times = None

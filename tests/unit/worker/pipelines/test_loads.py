"""Loads of data without Spark: their job groups, and data in memory that no request will read is removed."""

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.pipelines.sql import SqlData, stop_caching
from osrdyne_worker.pipelines.views import caching, loading
from osrdyne_worker.pipelines.views.caching import BackgroundCaching, cache_now, drop_cached
from osrdyne_worker.pipelines.views.datasets import SqlConfig, parse_config
from osrdyne_worker.pipelines.views.loading import DataProblemError, View, dataset_of
from osrdyne_worker.spark.session import SparkSessions


class FakeSession:
    """A session whose catalog knows what is in memory: the plans in `memory`, which several sessions may share.
    `counting` is called by each job that puts data there."""

    def __init__(self, counting: Callable[[], None] = lambda: None, *, memory: set[int] | None = None) -> None:
        self.views: dict[str, int] = {}
        self.memory: set[int] = set() if memory is None else memory
        self.counting = counting
        self.catalog = SimpleNamespace(
            cacheTable=lambda name: self.memory.add(self.views[name]),
            uncacheTable=lambda name: self.memory.discard(self.views[name]),
            tableExists=self.views.__contains__,
            isCached=lambda name: self.views[name] in self.memory,
        )

    @property
    def cached(self) -> set[str]:
        return {name for name, plan in self.views.items() if name.startswith("osrdyne_") and plan in self.memory}

    def table(self, name: str) -> Any:
        return SimpleNamespace(count=self.counting)

    def frame(self, *plan: object) -> Any:
        def create(name: str) -> None:
            self.views[name] = hash(plan)

        return SimpleNamespace(
            createOrReplaceTempView=create,
            schema=SimpleNamespace(fields=[]),
            where=lambda condition: self.frame(*plan, condition),
            semanticHash=lambda: hash(plan),
        )


class Literal(str):
    """A literal in a condition; the condition names it."""

    def isNotNull(self) -> str:
        return f"{self} is not null"


@pytest.fixture(autouse=True)
def without_spark(monkeypatch):
    monkeypatch.setattr(caching, "F", SimpleNamespace(lit=lambda value: Literal(value)))
    # Sessions of other tests, which have equal plans, may still exist.
    monkeypatch.setattr(caching, "_plans", caching._CachedPlans())


def config() -> SqlConfig:
    tables = [
        {"view": name, "path": "/data", "filters": {"tenant": "{tenant}"}, "cache": True, "format": "parquet"}
        for name in ("first", "second")
    ]
    return parse_config({"datasets": [{"key": "{tenant}", "tables": tables}]})


@pytest.mark.parametrize("fails", ["opening", "counting"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.proves("workers/reloads-dataset-cache-filters")
def test_failed_reload_leaves_nothing_in_memory(monkeypatch, fails, shared):
    """Each reload has its own mark: repeated failures would fill the memory. What other keys share stays."""
    first_is_cached = threading.Event()

    def count():
        if first_is_cached.is_set():
            raise DataProblemError("A file is gone.", code=500, error_code="dataset_unreadable")
        first_is_cached.set()

    session = FakeSession(count)

    def read(given, table):
        if table.spec.view == "second":
            assert first_is_cached.wait(120)
            if fails == "opening":
                raise DataProblemError("The path is gone.", code=404, error_code="dataset_not_found")
        return given.frame(table.spec.view)

    monkeypatch.setattr(loading, "_read", read)
    monkeypatch.setattr(loading, "_filtered", lambda frame, table, session: frame)
    with pytest.raises(DataProblemError):
        loading.load(session, dataset_of(config(), "key", session), mark="m", shared=shared)
    assert ("osrdyne_cached_first" in session.cached) == shared
    assert shared or session.cached == set()


def test_data_that_is_cached_after_the_unload_is_removed():
    """The job begins in the moment after `close` has cancelled those of its group."""
    began, unloaded = threading.Event(), threading.Event()

    def count():
        began.set()
        assert unloaded.wait(120)

    session = FakeSession(count)
    background = BackgroundCaching(session, "key", {"first": session.frame()}, lambda: None)
    background.request_ended()
    assert began.wait(120)
    background.close(drop=True)
    unloaded.set()
    assert background.wait(120)
    assert session.cached == set()


def two_keys(*, cached: bool = True) -> tuple[FakeSession, FakeSession]:
    """The sessions of two keys of a pooled process, which both have cached a view of the same files."""
    memory: set[int] = set()
    first, second = FakeSession(memory=memory), FakeSession(memory=memory)
    for session in (first, second) if cached else ():
        cache_now(session, "trains", session.frame("files"), "signature")
    return first, second


@pytest.mark.parametrize("end", ["drops", "stops", "is gone"])
@pytest.mark.proves("pooled/two-keys-process-cached")
def test_data_that_another_key_reads_stays_until_both_have_dropped_it(end):
    """A key that loads its data again drops the former data, which Spark counts as that of the first key."""
    first, second = two_keys()
    assert len(first.memory) == 1
    for _ in range(2):  # the thread of the first key drops its data too
        drop_cached(first, ["trains"])
    assert second.cached == {"osrdyne_cached_trains"}
    if end == "drops":
        drop_cached(second, ["trains"])
    elif end == "stops":
        data = SqlData(second, config(), "k")
        data._views = (View("trains", "parquet", (), cached=True),)
        stop_caching(Context(Key("k"), session=second, state=data))
    else:  # it was cut off, so `on_stop` has not run
        first, second = two_keys()
        del second
        gc.collect()
        drop_cached(first, ["trains"])
    assert first.memory == set()


@pytest.mark.parametrize(("filter_", "mark"), [("tenant = b", "signature"), ("tenant = a", "other")])
def test_data_of_another_plan_does_not_keep_that_of_a_key(filter_, mark):
    first, second = two_keys(cached=False)
    cache_now(first, "trains", first.frame("files", "tenant = a"), "signature")
    cache_now(second, "trains", second.frame("files", filter_), mark)
    drop_cached(first, ["trains"])
    assert (first.cached, second.cached) == (set(), {"osrdyne_cached_trains"})


@pytest.mark.proves("spark/start-key-pooled-process")
def test_load_that_was_cancelled_for_memory_fails_even_if_its_hook_goes_on():
    sessions = SparkSessions()
    jsc = SimpleNamespace(clearJobGroup=lambda: None)
    context = SimpleNamespace(setJobGroup=lambda *values, **options: None, _jsc=jsc)
    session: Any = SimpleNamespace(sparkContext=context)
    sessions._heap_watch = SimpleNamespace(  # type: ignore[assignment]
        began=lambda group, *, loads=False: began.append((group, loads)), ended=lambda group: None
    )
    began: list[tuple[str, bool]] = []

    def load():
        sessions._out_of_memory["w-start"] = "The load of the data was cancelled."
        return "half of the data"

    with pytest.raises(RequestError, match="load"):
        sessions.load_in_group(session, "w-start", load)
    assert (began, sessions._out_of_memory) == ([("w-start", True)], {})
    assert sessions.run_in_group(session, "r", lambda: "answer") == "answer"
    assert began[-1] == ("r", False)


def test_threads_that_open_views_belong_to_the_group_of_their_load(monkeypatch):
    properties = threading.local()
    context = SimpleNamespace(
        getLocalProperty=lambda name: getattr(properties, name, None),
        setLocalProperty=lambda name, value: setattr(properties, name, value),
    )
    session: Any = SimpleNamespace(_jsparkSession=None, sparkContext=context)
    context.setLocalProperty("spark.jobGroup.id", "w-start")
    context.setLocalProperty("spark.job.interruptOnCancel", "true")
    seen: list[tuple[str | None, ...]] = []

    def open_view(session, table, *, mark, on_cache):
        names = ("spark.jobGroup.id", "spark.job.interruptOnCancel", "spark.scheduler.pool")
        seen.append(tuple(context.getLocalProperty(name) for name in names))
        return SimpleNamespace(name="v", format="csv", cached=False)

    monkeypatch.setattr(loading, "open_view", open_view)
    loading.load(session, cast(Any, SimpleNamespace(tables=[None])))
    assert seen == [("w-start", "true", None)]

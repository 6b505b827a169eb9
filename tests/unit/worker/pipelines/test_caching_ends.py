"""Data in memory that no request will read is removed, without Spark: after a failed reload, and after an unload."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from osrdyne_worker.pipelines.views import caching, loading
from osrdyne_worker.pipelines.views.caching import BackgroundCaching
from osrdyne_worker.pipelines.views.datasets import ResolvedTable, SqlConfig, parse_config
from osrdyne_worker.pipelines.views.loading import DataProblemError, dataset_of


class FakeSession:
    """A session whose catalog knows what is in memory. `counting` is called by each job that puts data there."""

    def __init__(self, counting: Callable[[], None] = lambda: None) -> None:
        self.views: set[str] = set()
        self.cached: set[str] = set()
        self.counting = counting
        self.catalog = SimpleNamespace(
            cacheTable=self.cached.add,
            uncacheTable=self.cached.discard,
            tableExists=self.views.__contains__,
            isCached=self.cached.__contains__,
        )

    def table(self, name: str) -> Any:
        return SimpleNamespace(count=self.counting)

    def frame(self) -> Any:
        frame = SimpleNamespace(createOrReplaceTempView=self.views.add, schema=SimpleNamespace(fields=[]))
        frame.where = lambda condition: frame
        return frame


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "F", SimpleNamespace(lit=lambda value: value))


def config() -> SqlConfig:
    tables = [
        {"view": name, "path": "/data", "filters": {"tenant": "{tenant}"}, "cache": True, "format": "parquet"}
        for name in ("first", "second")
    ]
    return parse_config({"datasets": [{"key": "{tenant}", "tables": tables}]})


@pytest.mark.parametrize("fails", ["opening", "counting"])
@pytest.mark.parametrize("shared", [False, True])
def test_failed_reload_leaves_nothing_in_memory(monkeypatch: pytest.MonkeyPatch, fails: str, shared: bool) -> None:
    """Each reload has its own mark: repeated failures would fill the memory. What other keys share stays."""
    first_is_cached = threading.Event()

    def count() -> None:
        if first_is_cached.is_set():
            raise DataProblemError("A file is gone.", code=500, error_code="dataset_unreadable")
        first_is_cached.set()

    session = FakeSession(count)

    def read(given: FakeSession, table: ResolvedTable) -> Any:
        if table.spec.view == "second":
            assert first_is_cached.wait(120)
            if fails == "opening":
                raise DataProblemError("The path is gone.", code=404, error_code="dataset_not_found")
        return given.frame()

    monkeypatch.setattr(loading, "_read", read)
    monkeypatch.setattr(loading, "_filtered", lambda frame, table, session: frame)
    with pytest.raises(DataProblemError):
        loading.load(session, dataset_of(config(), "key", session), mark="m", shared=shared)
    assert ("osrdyne_cached_first" in session.cached) == shared
    assert shared or session.cached == set()


def test_data_that_is_cached_after_the_unload_is_removed() -> None:
    """The job begins in the moment after `close` has cancelled those of its group."""
    began, unloaded = threading.Event(), threading.Event()

    def count() -> None:
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


@pytest.mark.parametrize("second", ["a", "b"], ids=["same files", "other files"])
def test_loads_of_one_key_have_job_groups_of_their_own(second: str) -> None:
    """Spark runs no job in a group whose future jobs `close` has cancelled: the view would never be cached."""
    session = FakeSession()
    groups = {BackgroundCaching(session, "key", {}, lambda: None, mark)._group for mark in ("a", second)}
    assert len(groups) == 2

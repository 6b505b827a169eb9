"""The jobs of a load of data form a group that the heap watch can cancel. Without a JVM."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.pipelines.views import loading
from osrdyne_worker.spark.session import SparkSessions


@pytest.mark.proves("spark/start-key-pooled-process")
def test_load_that_was_cancelled_for_memory_fails_even_if_its_hook_goes_on() -> None:
    sessions = SparkSessions()
    jsc = SimpleNamespace(clearJobGroup=lambda: None)
    context = SimpleNamespace(setJobGroup=lambda *values, **options: None, _jsc=jsc)
    session: Any = SimpleNamespace(sparkContext=context)
    sessions._heap_watch = SimpleNamespace(  # type: ignore[assignment]
        began=lambda group, *, loads=False: began.append((group, loads)), ended=lambda group: None
    )
    began: list[tuple[str, bool]] = []

    def load() -> str:
        sessions._out_of_memory["w-start"] = "The load of the data was cancelled."
        return "half of the data"

    with pytest.raises(RequestError, match="load"):
        sessions.load_in_group(session, "w-start", load)
    assert (began, sessions._out_of_memory) == ([("w-start", True)], {})
    assert sessions.run_in_group(session, "r", lambda: "answer") == "answer"
    assert began[-1] == ("r", False)


def test_threads_that_open_views_belong_to_the_group_of_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = threading.local()
    context = SimpleNamespace(
        getLocalProperty=lambda name: getattr(properties, name, None),
        setLocalProperty=lambda name, value: setattr(properties, name, value),
    )
    session: Any = SimpleNamespace(_jsparkSession=None, sparkContext=context)
    context.setLocalProperty("spark.jobGroup.id", "w-start")
    context.setLocalProperty("spark.job.interruptOnCancel", "true")
    seen: list[tuple[str | None, ...]] = []

    def open_view(session: Any, table: Any, *, mark: str, on_cache: object) -> Any:
        names = ("spark.jobGroup.id", "spark.job.interruptOnCancel", "spark.scheduler.pool")
        seen.append(tuple(context.getLocalProperty(name) for name in names))
        return SimpleNamespace(name="v", format="csv", cached=False)

    monkeypatch.setattr(loading, "open_view", open_view)
    loading.load(session, cast(Any, SimpleNamespace(tables=[None])))
    assert seen == [("w-start", "true", None)]

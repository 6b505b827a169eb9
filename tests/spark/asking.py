"""What tests of the SQL pipeline and of sessions share: ask a call of a worker, and wait for a job."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from osrdyne_worker import Call, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.sql import SqlRequest

SLOW = "select count(*) from range(0, 1000000000000, 1, 1) where id % 7 = 8"
"""One task that does not end by itself: it leaves a core for others."""


def one_table(key: str, *, view: str = "t", **table: Any) -> dict[str, Any]:
    """The configuration of a worker with one view."""
    return {"datasets": [{"key": key, "tables": [{"view": view, **table}]}]}


def ask(call: Call, query: str | None = None, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    """The JSON of the answer."""
    document: dict[str, Any] = json.loads(
        pipeline.sql(call, SqlRequest(query=query, parameters=parameters, **fields)).body
    )
    return document


def rows(call: Call, query: str) -> list[list[Any]]:
    found: list[list[Any]] = ask(call, query)["rows"]
    return found


def refusal(call: Call, query: str | None = None, parameters: Any = None, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        pipeline.sql(call, SqlRequest(query=query, parameters=parameters, **fields))
    return caught.value


def wait_for(condition: Callable[[], Any], *, timeout: float = 120.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.05)


def active_jobs(spark: Any) -> list[int]:
    return list(spark.sparkContext.statusTracker().getActiveJobsIds())

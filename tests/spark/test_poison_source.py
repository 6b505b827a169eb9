"""`spark.read.format("osrdyne-poison")` against the real API server over a fake pool."""

import asyncio
import json
import threading
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from osrdyne.api.app import create_app
from osrdyne.api.server import ApiServer
from osrdyne.config.models import ApiSettings
from osrdyne.errors import LeadershipLostError
from osrdyne.metrics import Metrics
from osrdyne.testing.fakes.inspector import FakeInspector, poison_view
from osrdyne_worker.spark.poison_source import FORMAT, register


class Api:
    """An API server in a thread of its own, because Spark blocks."""

    def __init__(self) -> None:
        self.pool = FakeInspector()
        self._loop = asyncio.new_event_loop()
        self._server = ApiServer(lambda: create_app(self.pool, Metrics(), version="1"), ApiSettings(port=0))
        self._stop = asyncio.Event()
        self._server.bind()
        self.url = self._server.url
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.run())
        await self._stop.wait()
        serving.cancel()
        await asyncio.wait({serving})

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def api():
    api = Api()
    yield api
    api.close()


def read(spark: Any, url: str, **options: str) -> DataFrame:
    register(spark)
    frame: DataFrame = spark.read.format(FORMAT).option("url", url).options(**options).load()
    return frame


def test_entries_are_rows_and_stay_where_they_are(spark, api):
    api.pool.poison_views = [poison_view("e1"), poison_view("e2", key="漢 %", body=b"\xff\x00", last_at=1011.5)]
    rows = read(spark, api.url).orderBy("id").collect()
    assert [(row.id, row.key, bytes(row.body)) for row in rows] == [
        ("e1", "k", b'{"a": 1}'),
        ("e2", "漢 %", b"\xff\x00"),
    ]
    assert rows[1].last_at.astimezone(UTC) == datetime.fromtimestamp(1011.5, UTC)
    assert json.loads(rows[0].headers) == {"x-rpc-path": "/sql"}
    assert [(death.ended_with, death.others, death.log_lines) for death in rows[0].deaths] == [
        ("exit code 9", 0, ["loading", "out of memory"]),
        ("signal SIGKILL", 1, []),
    ]
    assert len(api.pool.poison_views) == 2


def test_all_pages_are_read_and_aggregated(spark, api):
    api.pool.poison_views = [poison_view(f"e{number}", path=f"/p{number % 2}") for number in range(250)]
    counted = read(spark, api.url).groupBy("path").count().orderBy("path").collect()
    assert [(row.path, row["count"]) for row in counted] == [("/p0", 125), ("/p1", 125)]


def test_options_pick_entries(spark, api):
    api.pool.poison_views = [poison_view("e1", key="a b&c"), poison_view("e2", last_at=1.0)]
    assert [row.id for row in read(spark, api.url, key="a b&c").collect()] == ["e1"]
    assert [row.id for row in read(spark, api.url, older_than="1500").collect()] == ["e2"]


def test_message_without_a_key_has_nulls(spark, api):
    api.pool.poison_views = [poison_view("e1", key=None, deliveries=None, last_at=None, first_at=None, deaths=())]
    [row] = read(spark, api.url).collect()
    assert (row.key, row.deliveries, row.last_at, row.deaths) == (None, None, None, [])


def test_missing_leader_and_missing_option_are_errors(spark, api):
    api.pool.failure = LeadershipLostError("No daemon is known to lead.")
    with pytest.raises(PySparkException, match="No daemon"):
        read(spark, api.url).collect()
    with pytest.raises(PySparkException, match="url"):
        spark.read.format(FORMAT).load().collect()

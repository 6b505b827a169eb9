"""A site queries the telemetry of its own devices: the events of all commits that were made before the query."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from asking import rows

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.telemetry.last_values.sqlite import SqliteStore
from osrdyne.telemetry.last_values.values import Changes, LastValue
from osrdyne_sources.rabbit_stream.rows import to_batch
from osrdyne_worker import RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries.lookup import LookupRequest
from osrdyne_worker.pipelines.telemetry.data_files import WriteRange
from osrdyne_worker.pipelines.telemetry.ranges import Range, store
from osrdyne_worker.pipelines.telemetry.table import COMMITS, Commit, Table

START = 1_795_341_600_000  # 2026-11-22, 10:00 UTC
HOUR = 3_600_000
SITES = [
    "a",
    "ab",
    "A",
    "%",
    "_",
    "a%",
    "o'neil",
    "' or '1'='1",
    '"; drop view warm; --',
    "é 漢 🚄",
    "a\\",
    "{site}",
    "..",
]


def written(table: Table, wanted: Range, events: Iterable[tuple[str, Mapping[str, Any]]], *, hour: int) -> list[str]:
    """Write one message for each event, which the ingress took in the given hour after the start."""
    headers = [{"x-osrdyne-key": key, "x-osrdyne-enqueued": START + hour * HOUR} for key, _ in events]
    messages = [
        StreamMessage(offset, "", "P-log-0", json.dumps(event).encode(), header)
        for offset, ((_, event), header) in enumerate(zip(events, headers, strict=True), wanted.start)
    ]
    task = WriteRange(str(table.directory), 0, wanted.number)
    return [batch.column(0)[0].as_py() for batch in task(iter([to_batch("P-log-0", messages)]))]


def commit(table: Table, *events: tuple[str, Mapping[str, Any]], hour: int = 0) -> Commit:
    last = table.last_commit(0)
    number, start = (1, 0) if last is None else (last.number + 1, last.stop)
    wanted = Range(number, start, start + len(events), start + len(events))
    return store(table, wanted, written(table, wanted, events, hour=hour), partition=0)


def config(directory: Path) -> dict[str, Any]:
    return {
        "base_directory": str(directory),
        "datasets": [
            {
                "key": "telemetry/{site:.+}",
                "tables": [
                    {"view": name, "format": "telemetry", "path": name, "keys": "{site}/%", "key_columns": ["key"]}
                    for name in ("warm", "cold")
                ],
            }
        ],
    }


@pytest.mark.proves("telemetry-tables/commit-made-query-runs")
def test_each_query_sees_all_commits_of_its_site(make_call, tmp_path):
    warm = Table(tmp_path / "warm")
    call = make_call(config(tmp_path), "telemetry/a")
    query = "select value from warm where series = 't' order by value"
    assert rows(call, query) == []
    commit(warm, ("a/1", {"series": "t", "value": 1}), ("b/1", {"series": "t", "value": 2}))
    # The plan of this query was remembered with the former files.
    assert rows(call, query) == [[1.0]]
    commit(warm, ("a/2", {"series": "t", "value": 3}), hour=1)
    assert rows(call, query) == [[1.0], [3.0]]
    # Not committed: an ingest that is at work or was killed.
    written(warm, Range(3, 3, 4, 4), [("a/3", {"series": "t", "value": 4})], hour=2)
    assert rows(call, query) == [[1.0], [3.0]]
    assert json.loads(
        pipeline.lookup([call], [LookupRequest(table="warm", key={"key": "a/2"}, columns=["value"])])[0].body
    )["rows"] == [[3.0]]
    assert pipeline.lookup([call], [LookupRequest(table="warm", key={"key": "b/1"})])[0].body.count(b"b/1") == 0
    # An hour that a query does not need is not read.
    other = next(Path(path) for path in warm.files() if "hour=11" in path)
    kept = other.read_bytes()
    other.write_bytes(b"damaged")
    assert rows(call, "select value from warm where date = '2026-11-22' and hour = 10") == [[1.0]]
    other.write_bytes(kept)
    # Both tables in one query: the archive has the event that warm no longer has.
    commit(Table(tmp_path / "cold"), ("a/1", {"series": "t", "value": 1, "ts": 5}), ("b/9", {"series": "t"}))
    warm.replace_files(
        0, [path.removeprefix(f"{warm.directory}/") for path in warm.files() if "hour=10" in path], after=2
    )
    assert rows(call, "select key, unix_millis(ts) from cold anti join warm using (key)") == [["a/1", 5]]
    plan = pipeline.explain(call, pipeline.ExplainRequest(query="select * from cold where ts > '2026-11-22'"))["plan"]
    assert "GreaterThan(ts,2026-11-22" in plan
    assert "StringStartsWith(key,a/)" in plan


@pytest.mark.proves("telemetry-tables/directory-table-cannot-read", "telemetry-tables/name-site-characters-meaning")
def test_site_is_data_and_its_table_may_fail_for_a_while(make_call, tmp_path):
    warm, described = Table(tmp_path / "warm"), {}
    commit(warm, *((f"{site}/{device}", {"series": "t", "value": device}) for site in SITES for device in (1, 2)))
    for site in SITES:
        call = make_call(config(tmp_path), f"telemetry/{site}")
        assert rows(call, "select key from warm order by key") == [[f"{site}/1"], [f"{site}/2"]]
        assert rows(call, "select count(*) from cold") == [[0]]
        described[site] = [view["columns"] for view in pipeline.schema(call)["views"]]
    # A table without commits has the columns of others.
    assert all(warm_columns == cold_columns for warm_columns, cold_columns in described.values())
    assert [column["name"] for column in described["a"][0]][-2:] == ["date", "hour"]
    log, moved = warm.directory / COMMITS, tmp_path / "moved"
    log.rename(moved)
    log.write_text("not a directory", encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        rows(call, "select 1")
    assert (caught.value.code, caught.value.error_code) == (503, "dataset_unreachable")
    log.unlink()
    moved.rename(log)
    assert len(rows(call, "select key from warm")) == 2
    # A link must not lead a key to a table outside of the base directory.
    elsewhere = tmp_path / "base"
    elsewhere.mkdir()
    (elsewhere / "warm").symlink_to(warm.directory)
    with pytest.raises(RequestError) as caught:
        rows(make_call(config(elsewhere), "telemetry/a"), "select 1")
    assert caught.value.error_code == "invalid_key"


def last_values(directory: Path, offset: int, **values: float) -> None:
    """Write one value of the series `t` of each key, as the last-value reader does."""
    store = SqliteStore(directory / "last.db", pool="plant", create=True)
    found = [
        LastValue(key, "t", offset * 1000, None, "telemetry", number, None, None, '{"unit":"C"}', 0, 0, offset, 0, None)
        for key, number in values.items()
    ]
    store.write([Changes(0, offset + 1, found)])
    store.close()


def test_last_values_of_a_site_are_those_of_the_moment(make_call, tmp_path):
    settings = config(tmp_path)
    last = {"view": "last", "format": "last-values", "path": "last.db", "pool": "plant", "keys": "{site}/%"}
    settings["datasets"][0]["tables"].append({**last, "key_columns": ["key"]})
    commit(Table(tmp_path / "warm"), ("a/1", {"series": "t", "value": 1}), ("b/1", {"series": "t", "value": 2}))
    call = make_call(settings, "telemetry/a")
    query = "select key, value, unix_millis(ts), attributes['unit'] from last order by key"
    # Only queries for last values need their database.
    assert rows(call, "select value from warm") == [[1.0]]
    with pytest.raises(RequestError) as caught:
        rows(call, query)
    assert (caught.value.code, caught.value.error_code) == (503, "dataset_unreachable")
    assert "osrdyne last-value" in caught.value.message
    last_values(tmp_path, 5, **{f"{site}/1": 1.5 for site in SITES})
    assert rows(call, query) == [["a/1", 1.5, 5, "C"]]
    last_values(tmp_path, 6, **{"a/2": 2.5, "ab/2": 3.5})
    assert rows(call, query) == [["a/1", 1.5, 5, "C"], ["a/2", 2.5, 6, "C"]]
    assert rows(call, "select last.value - warm.value from last join warm using (key, series)") == [[0.5]]
    last_values(tmp_path, 7, **{"a/2": 9.5})
    answer = pipeline.lookup([call], [LookupRequest(table="last", key={"key": "a/2"}, columns=["value"])])[0]
    assert json.loads(answer.body)["rows"] == [[9.5]]
    for site in SITES:
        found = rows(make_call(settings, f"telemetry/{site}"), "select key from last where key like '%/1'")
        assert found == [[f"{site}/1"]]


def test_uri_of_postgresql_lies_outside_of_the_data_and_stays_secret(make_call, tmp_path):
    secrets = tmp_path / "uri"
    settings = config(tmp_path / "data")
    view = {"view": "last", "format": "last-values", "store": "postgresql", "path": str(secrets), "pool": "plant"}
    settings["datasets"][0]["tables"] = [{**view, "keys": "{site}/%"}]
    call = make_call(settings, "telemetry/a")
    with pytest.raises(RequestError, match="No such file or directory") as missing:
        rows(call, "select * from last")
    secrets.write_text("postgresql://reader:hidden@127.0.0.1:1/sensors\n", encoding="utf-8")
    with pytest.raises(RequestError, match="PostgreSQL cannot be used for last values") as away:
        rows(call, "select * from last")
    assert "hidden" not in away.value.message
    assert [(one.value.code, one.value.error_code) for one in (missing, away)] == [
        (500, "dataset_unreadable"),
        (503, "dataset_unreachable"),
    ]

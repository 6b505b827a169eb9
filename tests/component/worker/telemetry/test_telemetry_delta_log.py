"""The Delta log of a table repeats each of its commits once."""

import json
import shutil
from typing import Any

import pytest
from stored_telemetry import HOUR, MINUTES, compact, delta_files, hour, ingest, live_files, worker_of

from osrdyne_worker.pipelines.ingest import publish_delta
from osrdyne_worker.pipelines.telemetry.delta_log import DeltaLog
from osrdyne_worker.pipelines.telemetry.live_files import DataFile
from osrdyne_worker.pipelines.telemetry.table import Commit, Table


def version(table: Table, number: int) -> list[dict[str, Any]]:
    path = table.directory / "_delta_log" / f"{number:020d}.json"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_commit_is_published_once(table):
    log = DeltaLog(table)
    assert log.publish() == -1
    for end in (2, 4):
        ingest(table, end=end, step=HOUR)
        assert log.publish() == DeltaLog(table).publish() == end // 2 - 1
    assert delta_files(table) == live_files(table)
    kinds = [next(iter(action)) for action in version(table, 0)]
    assert kinds == ["commitInfo", "protocol", "metaData", "add", "add", "txn"]
    assert version(table, 1)[-1]["txn"] | {"lastUpdated": 0} == {"appId": "osrdyne-0", "version": 2, "lastUpdated": 0}
    file = version(table, 1)[1]["add"]
    assert (file["partitionValues"], file["dataChange"]) == ({"date": "2026-11-22", "hour": "12"}, True)
    assert file["size"] == (table.directory / file["path"]).stat().st_size


def test_compaction_changes_no_rows_and_has_a_version_of_its_own(table):
    log = DeltaLog(table)
    ingest(table, end=2, step=30 * MINUTES)
    log.publish()
    ingest(table, end=6, step=30 * MINUTES)
    compact(table)
    ingest(table, end=8, step=30 * MINUTES)
    table.expire(0, hour(2))
    assert log.publish() == 3
    assert delta_files(table) == live_files(table)
    for number, changes in enumerate([True, True, False, True]):
        actions = [change for action in version(table, number) for change in action.values()]
        assert {one["dataChange"] for one in actions if "dataChange" in one} == {changes}


def test_table_without_a_delta_log_is_published_whole(table):
    log = DeltaLog(table)
    for end in (2, 4, 6):
        ingest(table, end=end, step=30 * MINUTES)
    compact(table)
    assert log.publish() == 0
    assert delta_files(table) == live_files(table)
    shutil.rmtree(table.directory / "_delta_log")
    ingest(table, end=8, step=HOUR)
    assert log.publish() == 0
    assert delta_files(table) == live_files(table)


@pytest.mark.proves("telemetry-tables/worker-dies-publishes-delta")
def test_two_workers_publish_the_same_commits_once(table, monkeypatch):
    """The other worker publishes between the decision and the write of this one."""
    ingest(table, end=2, step=HOUR)
    table.commit(Commit(1, 1, 0, 9, [DataFile("date=2026-11-22/hour=10/other.parquet", 12, 100)]))
    ours, theirs = DeltaLog(table), DeltaLog(Table(table.directory))
    write = ours._write

    def write_second(number, actions):
        theirs.publish()
        write(number, actions)

    monkeypatch.setattr(ours, "_write", write_second)
    assert ours.publish() == 0
    assert delta_files(table) == live_files(table)
    ingest(table, end=4, step=HOUR)
    assert ours.publish() == theirs.publish() == 1
    assert delta_files(table) == live_files(table)


@pytest.mark.proves("telemetry-tables/log-delta-table-cannot")
def test_delta_log_that_cannot_be_written_is_written_by_a_later_request(table):
    worker = worker_of(table, format="delta")
    ingest(table, end=2, step=HOUR)
    obstacle = table.directory / "_delta_log"
    obstacle.write_text("a file")
    assert publish_delta(worker) == {"delta_version": None}
    obstacle.unlink()
    ingest(table, end=4, step=HOUR)
    assert publish_delta(worker) == {"delta_version": 0}
    assert delta_files(table) == live_files(table)
    assert publish_delta(worker_of(table)) == {}

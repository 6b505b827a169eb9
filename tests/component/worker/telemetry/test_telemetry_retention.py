"""A worker removes what is older than the retention of its table, and no error of that is an error of the ingest."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from stored_telemetry import START, events, ingest, stored

from osrdyne_worker.pipelines.ingest import Ingest, make_room, parse_config, remove_old_events
from osrdyne_worker.pipelines.telemetry.storage_limits import StorageLimitError, usage_of
from osrdyne_worker.pipelines.telemetry.table import Table

DAY = 86_400


def worker(table: Table, *, days: int | None, max_rows: int | None = None) -> Ingest:
    config = {
        "uri_file": "/uri",
        "tables": {"warm": {"directory": str(table.directory), "retention_days": days, "max_rows": max_rows}},
    }
    return Ingest(parse_config(config), "P", "warm", 0, table)


@pytest.mark.parametrize(("days", "first"), [(None, 0), (2, 1), (1, 2)])
def test_events_are_kept_for_the_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int | None, first: int
) -> None:
    table = Table(tmp_path)
    ingest(table, end=4, step=DAY * 1_000)
    monkeypatch.setattr(time, "time", lambda: START / 1_000 + 3 * DAY + 3_599)
    remove_old_events(worker(table, days=days))
    assert stored(table) == events(first, 4)


@pytest.mark.proves("telemetry-tables/retention-table-cannot-remove")
def test_table_that_refuses_the_removal_is_no_error(tmp_path: Path) -> None:
    table = Table(tmp_path)
    ingest(table, end=4)
    (tmp_path / "_commits" / "0" / f"{1:020d}.json").write_text("{}")
    one = worker(table, days=1)
    remove_old_events(one)
    assert one.expired_at > 0


@pytest.mark.proves("telemetry-tables/table-reaches-storage-limit")
def test_paused_table_continues_when_its_old_events_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path)
    ingest(table, end=4, step=DAY * 1_000)
    one = worker(table, days=2, max_rows=usage_of(table).rows)
    monkeypatch.setattr(time, "time", lambda: START / 1_000)
    with pytest.raises(StorageLimitError):
        make_room(one)
    monkeypatch.setattr(time, "time", lambda: START / 1_000 + 3 * DAY + 3_599)
    assert make_room(one) == 0
    assert stored(table) == events(1, 4)

"""An ingest that has committed is answered as such, also if what follows the commit fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stored_telemetry import ingest, next_of, write
from structlog.testing import capture_logs

from osrdyne_worker import Call
from osrdyne_worker.pipelines import ingest as pipeline
from osrdyne_worker.pipelines.ingest import Ingest, parse_config
from osrdyne_worker.pipelines.telemetry.ranges import Range
from osrdyne_worker.pipelines.telemetry.table import Table, TableDamagedError

CALL = cast(Call, SimpleNamespace(context=SimpleNamespace(session=None), deadline=60.0))


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ingest:
    """The worker of partition 0, which has one commit; the messages up to offset 5 are still to be stored."""
    table = Table(tmp_path / "table")
    ingest(table, end=2)
    settings = {"directory": str(table.directory), "max_rows": 1, "on_storage_limit": "purge"}
    config: dict[str, Any] = {"uri_file": "/uri", "management_uri_file": "/uri", "tables": {"cold": settings}}
    monkeypatch.setattr(pipeline, "_plan", lambda *arguments, **named: (next_of(table, end=5), None))
    return Ingest(parse_config(config), "P", "cold", 0, table)


def damage(worker: Ingest, partition: int) -> None:
    directory = worker.table.directory / "_commits" / str(partition)
    directory.mkdir(exist_ok=True)
    (directory / f"{1:020d}.json").write_text("{")


@pytest.mark.proves("telemetry-tables/commit-table-missing-cannot")
def test_committed_ingest_is_answered_although_other_commits_cannot_be_read(
    worker: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_damage(session: object, worker: Ingest, wanted: Range, copies: object) -> list[str]:
        damage(worker, partition=1)
        return write(worker.table, wanted)

    monkeypatch.setattr(pipeline, "_write", write_and_damage)
    with capture_logs() as logs:
        answer = pipeline._ingest(CALL, worker, None)
    assert (answer["rows"], answer["commit"]) == (6, 2)
    assert (last := worker.table.last_commit(0)) is not None
    assert (last.number, last.stop) == (2, 5)
    assert (answer["storage"], answer["position_saved"]) == ({"purged": 0}, False)
    assert sum(entry["log_level"] == "warning" for entry in logs) == 3


def test_ingest_without_a_commit_reports_that_commits_cannot_be_read(worker: Ingest) -> None:
    ingest(worker.table, end=5)
    damage(worker, partition=1)
    with pytest.raises(TableDamagedError):
        pipeline._ingest(CALL, worker, None)

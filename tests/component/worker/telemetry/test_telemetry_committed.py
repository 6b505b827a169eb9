"""An ingest that has committed is answered as such, also if what follows the commit fails."""

from types import SimpleNamespace
from typing import cast

import pytest
from stored_telemetry import commit_file, ingest, next_of, worker_of, write
from structlog.testing import capture_logs

from osrdyne_worker import Call
from osrdyne_worker.pipelines import ingest as pipeline
from osrdyne_worker.pipelines.ingest import Ingest
from osrdyne_worker.pipelines.telemetry.table import TableDamagedError

CALL = cast(Call, SimpleNamespace(context=SimpleNamespace(session=None), deadline=60.0))


@pytest.fixture
def worker(table, monkeypatch):
    """The worker of partition 0, which has one commit; the messages up to offset 5 are still to be stored."""
    ingest(table, end=2)
    monkeypatch.setattr(pipeline, "_plan", lambda *arguments, **named: (next_of(table, end=5), None))
    return worker_of(table, max_rows=1, on_storage_limit="purge")


def damage(worker: Ingest) -> None:
    """That of another partition."""
    commit = commit_file(worker.table, 1, partition=1)
    commit.parent.mkdir()
    commit.write_text("{")


@pytest.mark.proves("telemetry-tables/commit-table-missing-cannot")
def test_committed_ingest_is_answered_although_other_commits_cannot_be_read(worker, monkeypatch):
    def write_and_damage(session, worker, wanted, copies):
        damage(worker)
        return write(worker.table, wanted)

    monkeypatch.setattr(pipeline, "_write", write_and_damage)
    with capture_logs() as logs:
        answer = pipeline._ingest(CALL, worker, None)
    assert (answer["rows"], answer["commit"]) == (6, 2)
    assert (last := worker.table.last_commit(0)) is not None
    assert (last.number, last.stop) == (2, 5)
    assert (answer["storage"], answer["position_saved"]) == ({"purged": 0}, False)
    assert sum(entry["log_level"] == "warning" for entry in logs) == 3


def test_ingest_without_a_commit_reports_that_commits_cannot_be_read(worker):
    ingest(worker.table, end=5)
    damage(worker)
    with pytest.raises(TableDamagedError):
        pipeline._ingest(CALL, worker, None)

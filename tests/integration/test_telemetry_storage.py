"""A worker that is killed leaves a table with each event once, and the next ingest completes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from killed_ingest import STEP
from stored_telemetry import committed, compact, delta_files, events, ingest, live_files, on_disk, stored

from osrdyne_worker.pipelines.telemetry.delta_log import DeltaLog
from osrdyne_worker.pipelines.telemetry.table import Table

pytestmark = pytest.mark.usefixtures("processes")


@pytest.mark.nightly
@pytest.mark.proves(
    "telemetry-tables/worker-dies-during-compaction",
    "telemetry-tables/worker-dies-during-ingest",
    "telemetry-tables/worker-dies-publishes-delta",
)
def test_worker_killed_at_any_step_stores_each_event_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no computer ends here
    script = Path(__file__).with_name("killed_ingest.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(script), str(tmp_path)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    seen = []
    for number in range(1, int(printed.stdout) + 1):
        table = Table(tmp_path / str(number))
        last = table.last_commit(0)
        assert last is not None
        assert stored(table) == events(0, last.stop)
        checkpoints = sorted(table.directory.rglob("*.checkpoint"))
        uncommitted = on_disk(table) - committed(table) - {str(table.directory / one) for one in table.live(0).removed}
        seen.append((last.number, int(checkpoints[-1].stem), bool(uncommitted)))
        before = table.live(0)
        for path in checkpoints:
            path.unlink()
        table = Table(table.directory)
        assert table.live(0) == before
        assert ingest(table, end=30, step=STEP).stop == 30
        compact(table)
        assert stored(table) == events(0, 30)
        DeltaLog(table).publish()
        assert delta_files(table) == live_files(table)
        # What a worker does when it starts.
        table.remove_uncommitted(0)
        removed = {str(table.directory / one) for one in table.live(0).removed}
        assert on_disk(table) - removed == committed(table)
        assert not list(table.directory.rglob("*.tmp"))
    # Killed before any file, with files that no commit names, and before and after the checkpoint of each commit.
    assert {(1, 1, False), (1, 1, True), (2, 2, False), (2, 2, True)} <= set(seen)
    assert {(2, 1), (2, 2), (3, 2), (3, 3)} <= {one[:2] for one in seen}
    assert seen == sorted(seen, key=lambda one: one[:2])

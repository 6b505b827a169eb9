"""The warm-up of a pooled process: it does what keys do, leaves nothing behind, and gives way to the first key."""

import tempfile

import pytest

from osrdyne_worker import Context
from osrdyne_worker.pipelines.warm_up import KEY, ROUNDS, WarmUp
from osrdyne_worker.spark.key_sessions import KeySparkSessions, LivingKeys

pytestmark = pytest.mark.nightly

PATIENCE = 240.0


@pytest.fixture
def warm_up(sessions, spark):
    return WarmUp(KeySparkSessions(sessions, spark, LivingKeys(spark)), Context(key=KEY, worker_id="process"))


def test_warm_up_runs_to_its_end_and_leaves_nothing(warm_up, spark, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = [table.name for table in spark.catalog.listTables()]
    warm_up.start()
    assert warm_up.wait(PATIENCE)
    assert warm_up.rounds == ROUNDS
    assert [table.name for table in spark.catalog.listTables()] == before
    assert list(tmp_path.iterdir()) == []


def test_stopped_warm_up_ends_early(warm_up):
    warm_up.stop()
    warm_up.start()
    warm_up.close()
    assert warm_up.wait(0.0)
    assert warm_up.rounds == 0


def test_failure_of_the_warm_up_harms_nothing(warm_up, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("osrdyne_worker.pipelines.warm_up._write_tables", fail)
    warm_up.start()
    assert warm_up.wait(PATIENCE)
    assert warm_up.rounds == 0

"""A table on disk, without Spark."""

import pytest

from osrdyne_worker.pipelines.telemetry.table import Table


@pytest.fixture
def table(tmp_path):
    return Table(tmp_path / "cold")

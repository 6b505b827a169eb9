"""A table on disk, without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from osrdyne_worker.pipelines.telemetry.table import Table


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "cold")

"""Spark reads a table of telemetry as the documentation says."""

import re
from pathlib import Path
from typing import Any

from stored_telemetry import committed, ingest, next_of, on_disk, write

from osrdyne_worker.pipelines.telemetry.table import Table

HOUR = 3_600_000


def test_spark_reads_committed_rows_only(spark, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "telemetry" / "storage.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert "/data/cold" in found[1]
    table = Table(tmp_path)
    ingest(table, end=6, step=HOUR)
    write(table, next_of(table, end=9), step=HOUR)
    assert on_disk(table) > committed(table)
    names: dict[str, Any] = {"spark": spark}
    exec(compile(found[1].replace("/data/cold", str(tmp_path)), "storage.md", "exec", dont_inherit=True), names)
    events = names["events"]
    assert events.columns[-2:] == ["date", "hour"]
    rows = events.where("date = '2026-11-22' and hour = 11").orderBy("index").collect()
    assert [(row.offset, row["index"], row.series, row.attributes) for row in rows] == [
        (1, 0, "a", {}),
        (1, 1, "b", {}),
    ]
    assert rows[0].ts == rows[0].enqueued
    assert events.count() == 12

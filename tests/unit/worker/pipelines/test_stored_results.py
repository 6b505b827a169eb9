"""The files of results that are read page by page, without Spark: which of them expire."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from osrdyne_worker import RequestError
from osrdyne_worker.pipelines.queries import paging
from osrdyne_worker.pipelines.queries.paging import StoredResults
from osrdyne_worker.pipelines.views.datasets import PagingConfig

LATER = 10_000.0
SCHEMA = pa.schema({"n": pa.int64()})
LIMITS: Any = {"limit": None, "max_bytes": 2**20, "too_large": AssertionError, "check": lambda: None}


def results(directory: Path, *, at: float) -> StoredResults:
    """The results of a worker whose clock is `at` seconds ahead of the times of the files."""
    now = directory.stat().st_mtime + at
    return StoredResults(PagingConfig(directory=str(directory), expiry=600.0), pool="p", key="k", now=lambda: now)


def query(batches: Generator[pa.RecordBatch, None, None]) -> Any:
    return SimpleNamespace(frame=batches, types=(("n", "bigint"),))


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "arrow_batches", lambda frame: (SCHEMA, frame))
    monkeypatch.setattr(paging, "estimated_bytes", lambda frame: None)


def one_row() -> Generator[pa.RecordBatch, None, None]:
    yield pa.record_batch({"n": [1]}, schema=SCHEMA)


def first_rows(stored: StoredResults, batches: Generator[pa.RecordBatch, None, None]) -> Any:
    return stored.first_page(query(batches), size=1, limit=None)


@pytest.mark.proves("spark/query-writes-row-longer")
def test_result_whose_query_is_slow_does_not_expire_while_it_is_written(tmp_path: Path) -> None:
    """Another worker of the same directory makes room meanwhile, long after the last row was written."""

    def slow() -> Generator[pa.RecordBatch, None, None]:
        yield pa.record_batch({"n": [1]}, schema=SCHEMA)
        first_rows(results(tmp_path, at=LATER), one_row())
        yield pa.record_batch({"n": [2]}, schema=SCHEMA)

    page = first_rows(results(tmp_path, at=0.0), slow())
    assert page.total_rows == 2
    assert json.loads(page.answer(accept=None).body)["rows"] == [[1]]
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]


def test_file_that_is_uploaded_does_not_expire_and_is_removed_afterwards(tmp_path: Path) -> None:
    stored = results(tmp_path, at=0.0)
    with stored.spilled(query(one_row()), **LIMITS) as (path, rows):
        first_rows(results(tmp_path, at=LATER), one_row())
        assert (path.exists(), rows) == (True, 1)
    assert list(tmp_path.iterdir()) == []
    # An error of the upload is not one of the directory.
    with pytest.raises(OSError, match="refused by the store"), stored.spilled(query(one_row()), **LIMITS):
        raise OSError("refused by the store")
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stored = StoredResults(PagingConfig(directory=f"{tmp_path}/file"), pool="p", key="k")
    with pytest.raises(RequestError, match="/file") as caught:
        first_rows(stored, one_row())
    assert caught.value.error_code == "paging_unavailable"


def test_file_of_a_worker_that_has_died_expires(tmp_path: Path) -> None:
    left = tmp_path / "0-0.unfinished"
    left.write_bytes(b"ARROW1")
    first_rows(results(tmp_path, at=0.0), one_row())
    assert left.exists(), "another worker may be writing it"
    first_rows(results(tmp_path, at=LATER), one_row())
    assert not left.exists()

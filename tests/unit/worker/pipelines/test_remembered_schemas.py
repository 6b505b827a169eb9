"""Schemas that are remembered from one worker to the next: only for exactly the same files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from osrdyne_worker.pipelines.views.schemas import RememberedSchemas, signature

SCHEMA = {"type": "struct", "fields": []}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    directory = tmp_path / "table" / "day=1"
    directory.mkdir(parents=True)
    (directory / "part-0.parquet").write_bytes(b"rows")
    return directory.parent


@pytest.fixture
def schemas(tmp_path: Path, table: Path) -> RememberedSchemas:
    schemas = RememberedSchemas(tmp_path / "schemas", spark_version="4.3.0")
    schemas.put(str(table), "parquet", {}, SCHEMA, files=signature(str(table)) or "")
    return schemas


def test_schema_of_the_same_files_is_known(schemas: RememberedSchemas, tmp_path: Path, table: Path) -> None:
    assert schemas.get(str(table), "parquet", {}) == SCHEMA
    assert schemas.get(str(table), "orc", {}) is None
    assert schemas.get(str(table), "parquet", {"mergeSchema": True}) is None
    assert schemas.get(str(table), "csv", {}) is None
    of_another_spark = RememberedSchemas(tmp_path / "schemas", spark_version="4.4.0")
    assert of_another_spark.get(str(table), "parquet", {}) is None
    settings = {"spark.sql.parquet.inferTimestampNTZ.enabled": "false"}
    with_other_settings = RememberedSchemas(tmp_path / "schemas", spark_version="4.3.0", settings=settings)
    assert with_other_settings.get(str(table), "parquet", {}) is None


@pytest.mark.parametrize("change", ["added", "rewritten", "replaced", "touched", "removed"])
def test_schema_of_changed_files_is_read_again(schemas: RememberedSchemas, table: Path, change: str) -> None:
    file = table / "day=1" / "part-0.parquet"
    match change:
        case "added":
            (table / "day=2").mkdir()
            (table / "day=2" / "part-0.parquet").write_bytes(b"rows")
        case "rewritten":
            file.write_bytes(b"more rows")
        case "replaced":
            times = file.stat().st_atime_ns, file.stat().st_mtime_ns
            other = table / "new"
            other.write_bytes(b"rowS")
            os.utime(other, ns=times)
            other.replace(file)
        case "touched":
            os.utime(file, ns=(0, 0))
        case "removed":
            file.unlink()
    assert schemas.get(str(table), "parquet", {}) is None


def test_damaged_file_and_one_that_others_may_write_are_ignored(
    schemas: RememberedSchemas, tmp_path: Path, table: Path
) -> None:
    (file,) = (tmp_path / "schemas").iterdir()
    file.chmod(0o666)
    assert schemas.get(str(table), "parquet", {}) is None
    file.chmod(0o600)
    assert schemas.get(str(table), "parquet", {}) == SCHEMA
    for text in ("", "{", "[]", '{"files": 1}'):
        file.write_text(text)
        assert schemas.get(str(table), "parquet", {}) is None


def test_schemas_are_limited(schemas: RememberedSchemas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osrdyne_worker.pipelines.views.schemas.MAX_SCHEMAS", 20)
    for number in range(50):
        schemas.put(f"/data/{number}", "parquet", {}, SCHEMA, files="x")
    assert 18 <= len(list((tmp_path / "schemas").iterdir())) <= 20


def test_directory_that_cannot_be_written_costs_nothing(tmp_path: Path, table: Path) -> None:
    (tmp_path / "file").touch()
    schemas = RememberedSchemas(tmp_path / "file" / "schemas", spark_version="4.3.0")
    schemas.put(str(table), "parquet", {}, SCHEMA, files="x")
    assert schemas.get(str(table), "parquet", {}) is None


@pytest.mark.parametrize("path", ["s3a://bucket/table", "/data/*.parquet", "/nowhere/at/all", "relative"])
def test_only_local_paths_without_links_that_lead_back_have_a_signature(table: Path, path: str) -> None:
    assert signature(path) is None
    (table / "loop").symlink_to(table)
    assert signature(str(table)) is None

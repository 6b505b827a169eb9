"""The files below the tables of a key: their version, writes that have not ended, and schemas of the same files."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osrdyne_worker.pipelines.views import data_versions
from osrdyne_worker.pipelines.views.data_versions import ABANDONED_AFTER, SETTLED_AFTER, DataFiles, data_files
from osrdyne_worker.pipelines.views.datasets import parse_config, resolve
from osrdyne_worker.pipelines.views.schemas import RememberedSchemas, signature
from osrdyne_worker.spark.files.file_listing import ListedFile, ListingError


class Table:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.write("part-0", "_SUCCESS")

    def write(self, *names: str) -> None:
        for name in names:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(b"rows")

    def files(self, **options: Any) -> DataFiles:
        tables = {"view": "t", "path": str(self.path), **options}
        return data_files(resolve(parse_config({"datasets": [{"key": "k", "tables": [tables]}]}), "k").tables)


@pytest.fixture
def table(tmp_path):
    return Table(tmp_path / "t")


def test_every_change_of_a_file_changes_the_signature_and_the_latest_is_the_version(table):
    assert table.files() == table.files()
    seen = {table.files().signature}
    for change in (
        lambda: table.write("part-1"),
        lambda: (table.path / "part-1").rename(table.path / "part-2"),
        lambda: os.utime(table.path / "part-2", (1, 1)),
        lambda: (table.path / "part-2").write_bytes(b"ROWS"),
        lambda: table.write("day=1/part-0"),
        lambda: table.path.rename(table.path.with_name("former")),
        lambda: Table(table.path),
    ):
        change()
        assert table.files().signature not in seen
        seen.add(table.files().signature)
    os.utime(table.path / "part-0", (2e9, 2e9))
    assert table.files().newest_ms == 2_000_000_000_000
    os.utime(table.path / "part-0", (1, 1))  # also of a file that keeps its time
    assert (table.files().newest_ms or 0) >= int((table.path / "part-0").stat().st_ctime * 1000)


@pytest.mark.parametrize("name", ["_temporary/0/part-1", ".spark-staging-17/part-1"])
@pytest.mark.proves("files/directory-view-half-written", "files/write-failed-left-temporary")
def test_write_that_has_not_ended_is_seen_for_a_while_and_does_not_count_as_data(table, monkeypatch, name):
    before = table.files()
    table.write(name)
    now = time.time()
    os.utime(table.path / name, (now + 1, now + 1))  # file systems count time in steps of a few milliseconds
    assert table.files().signature == before.signature
    reason = table.files().being_written(before)
    assert name.split("/")[0] in (reason or "")
    assert table.files().being_written() == reason, "also at the first load"
    assert table.files(format="delta").being_written() is None, "transactional formats are never half written"
    for later, is_written in ((-60, True), (60, False)):  # the write may have failed
        with monkeypatch.context() as patch:
            patch.setattr(data_versions.time, "time", lambda later=later: now + ABANDONED_AFTER + later)
            assert (table.files().being_written() is not None) is is_written
    os.utime(table.path / "_SUCCESS", (now + 2, now + 2))  # a later write has ended
    assert table.files().being_written(before) is None


@pytest.mark.parametrize("state", ["without its success file", "empty", "gone"])
@pytest.mark.proves("files/directory-view-half-written")
def test_directory_is_being_written_until_it_has_settled(table, state):
    before = table.files()
    (table.path / "_SUCCESS").unlink()
    if state == "without its success file":
        table.write("part-1")
        assert table.files().being_written() is None, "a directory that never had one is complete"
    else:
        before = table.files()
        (table.path / "part-0").unlink()
    if state == "gone":
        table.path.rmdir()
    reason = table.files().being_written(before)
    assert reason is not None
    assert ("_SUCCESS" in reason) == (state == "without its success file")
    assert table.files().being_written(before, now=time.time() + SETTLED_AFTER + 60) is None


@pytest.mark.proves("files/file-removed-worker-lists")
def test_file_removed_during_a_listing_does_not_hide_the_others(table, monkeypatch):
    """A writer moves files out of `_temporary` all the time: a listing in between must still find that directory."""
    table.write("_temporary/0/part-1", "_temporary/0/part-2")
    status_of = Path.stat

    def stat(path, *, follow_symlinks=True):
        if path.name == "part-1":
            path.unlink(missing_ok=True)
        return status_of(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    assert table.files().being_written() is not None
    assert table.files().tables["t"].count == 1
    assert table.files(path="s3a://bucket/t").signature is None
    assert table.files(path=f"{table.path}/*").newest_ms is None
    assert table.files().signature is not None
    monkeypatch.setattr(data_versions, "MAX_FILES", 1)
    table.write("part-3", "part-4")
    assert table.files().signature is None, "too many to be listed"


class Remote:
    """A listing of a file system that is not local."""

    def __init__(self) -> None:
        self.files = {
            "": ListedFile("", True, 0, 5.0, "-"),
            "part-0": ListedFile("part-0", False, 10, 6.0, "a"),
            "part%201": ListedFile("part%201", False, 10, 7.5, "b"),
        }

    def change(self, name: str, **values: Any) -> None:
        known = self.files.get(name, ListedFile(name, False, 1, 7.0, "-"))
        self.files[name] = replace(known, **values)

    def listed(self, error: Exception | None = None, **options: Any) -> DataFiles:
        def list_remote(path: str) -> Iterator[ListedFile]:
            assert path == "s3a://bucket/t"
            yield from self.files.values()
            if error is not None:
                raise error

        table = {"view": "t", "path": "s3a://bucket/t", **options}
        config = parse_config({"datasets": [{"key": "k", "tables": [table]}]})
        return data_files(resolve(config, "k").tables, list_remote)


@pytest.mark.proves("files/file-system-watched-dataset")
def test_every_change_of_a_remote_file_changes_the_signature(monkeypatch):
    remote = Remote()
    seen = {remote.listed().signature}
    assert remote.listed().newest_ms == 7500
    remote.files = dict(reversed(remote.files.items()))
    assert {remote.listed().signature} == seen, "an object store lists in any order"
    for change in ({"size": 11}, {"modified": 6.5}, {"identity": "c"}):
        remote.change("part-0", **change)
        seen.add(remote.listed().signature)
    remote.change("day=1", is_directory=True)
    seen.add(remote.listed().signature)
    del remote.files["part-0"]
    seen.add(remote.listed().signature)
    assert len(seen) == 6
    assert remote.listed(ListingError("refused")).signature is None
    assert remote.listed(FileNotFoundError()).tables["t"].signature == "missing"
    monkeypatch.setattr(data_versions, "MAX_FILES", 1)
    assert remote.listed().signature is None


SCHEMA = {"type": "struct", "fields": []}


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "table" / "day=1"
    directory.mkdir(parents=True)
    (directory / "part-0.parquet").write_bytes(b"rows")
    return directory.parent


@pytest.fixture
def schemas(tmp_path, data):
    schemas = RememberedSchemas(tmp_path / "schemas", spark_version="4.3.0")
    schemas.put(str(data), "parquet", {}, SCHEMA, files=signature(str(data)) or "")
    return schemas


def test_schema_of_the_same_files_is_known(schemas, tmp_path, data):
    assert schemas.get(str(data), "parquet", {}) == SCHEMA
    for format_, options in (("orc", {}), ("csv", {}), ("parquet", {"mergeSchema": True})):
        assert schemas.get(str(data), format_, options) is None
    settings = {"spark.sql.parquet.inferTimestampNTZ.enabled": "false"}
    for version, other in (("4.4.0", {}), ("4.3.0", settings)):
        found = RememberedSchemas(tmp_path / "schemas", spark_version=version, settings=other)
        assert found.get(str(data), "parquet", {}) is None


def replace_with_the_same_times(file: Path) -> None:
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    other = file.parents[1] / "new"
    other.write_bytes(b"rowS")
    os.utime(other, ns=times)
    other.replace(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda file: (file.parent / "part-1.parquet").write_bytes(b"rows"),
        lambda file: file.write_bytes(b"more rows"),
        replace_with_the_same_times,
        lambda file: os.utime(file, ns=(0, 0)),
        Path.unlink,
    ],
    ids=["added", "rewritten", "replaced", "touched", "removed"],
)
def test_schema_of_changed_files_is_read_again(schemas, data, change):
    change(data / "day=1" / "part-0.parquet")
    assert schemas.get(str(data), "parquet", {}) is None


def test_remembered_schemas_that_cannot_be_trusted_are_ignored_and_their_number_is_limited(
    schemas, tmp_path, data, monkeypatch
):
    (file,) = (tmp_path / "schemas").iterdir()
    file.chmod(0o666)
    assert schemas.get(str(data), "parquet", {}) is None
    file.chmod(0o600)
    assert schemas.get(str(data), "parquet", {}) == SCHEMA
    for text in ("", "{", "[]", '{"files": 1}'):
        file.write_text(text)
        assert schemas.get(str(data), "parquet", {}) is None
    below_a_file = RememberedSchemas(file / "schemas", spark_version="4.3.0")
    below_a_file.put(str(data), "parquet", {}, SCHEMA, files="x")
    assert below_a_file.get(str(data), "parquet", {}) is None
    monkeypatch.setattr("osrdyne_worker.pipelines.views.schemas.MAX_SCHEMAS", 20)
    for number in range(50):
        schemas.put(f"/data/{number}", "parquet", {}, SCHEMA, files="x")
    assert 18 <= len(list((tmp_path / "schemas").iterdir())) <= 20


@pytest.mark.parametrize("path", ["s3a://bucket/table", "/data/*.parquet", "/nowhere/at/all", "relative"])
def test_only_local_paths_without_links_that_lead_back_have_a_signature(data, path):
    assert signature(path) is None
    (data / "loop").symlink_to(data)
    assert signature(str(data)) is None

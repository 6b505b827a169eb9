"""Queries get the files of all commits that were made before them, and of no others."""

import json
import shutil
from pathlib import Path

import pytest
from stored_telemetry import HOUR, commit_file, ingest, next_of, on_disk, refusing_writes, write

from osrdyne_worker.pipelines.telemetry.listing import CommittedFiles, Listing
from osrdyne_worker.pipelines.telemetry.table import StorageError, Table, TableDamagedError


def paths(listing: Listing, table: Table) -> set[str]:
    return {f"{table.directory}/date={date}/hour={hour}/{name}" for date, hour, name, _ in listing.files}


@pytest.mark.proves("telemetry-tables/commit-made-query-runs")
def test_listing_has_each_commit_as_soon_as_it_is_made(table):
    committed = CommittedFiles(table.directory)
    assert committed.current() is committed.current()
    assert committed.current().files == ()
    for end in (10, 20, 30):
        ingest(table, end=end, step=HOUR)
        listing = committed.current()
        assert paths(listing, table) == set(table.files())
        assert committed.current() is listing
    assert {size for *_, size in listing.files} == {Path(path).stat().st_size for path in table.files()}


def test_uncommitted_and_removed_files_are_not_listed(table):
    committed = CommittedFiles(table.directory)
    ingest(table, end=4, step=HOUR)
    before = committed.current()
    write(table, next_of(table, end=9), step=HOUR)
    assert committed.current() is before
    removed = [path.removeprefix(f"{table.directory}/") for path in table.files()[:1]]
    table.replace_files(0, removed, after=1)
    assert paths(committed.current(), table) == set(table.files()) < paths(before, table) < on_disk(table)


def test_partition_that_begins_later_is_listed(table):
    committed = CommittedFiles(table.directory)
    ingest(table, end=4)
    assert len(committed.current().files) == 2
    commit = commit_file(table, 1, partition=3)
    commit.parent.mkdir()
    assert len(committed.current().files) == 2
    shutil.copy(commit_file(table, 1), commit)
    assert len(committed.current().files) == 4


@pytest.mark.proves("telemetry-tables/table-restored-backup-workers")
def test_table_that_was_restored_is_listed_again(table, tmp_path):
    committed = CommittedFiles(table.directory)
    ingest(table, end=4)
    shutil.copytree(table.directory, tmp_path / "backup")
    ingest(table, end=8)
    assert len(committed.current().files) == 4
    # Another second commit than the one that was read.
    shutil.rmtree(table.directory)
    shutil.copytree(tmp_path / "backup", table.directory)
    other = Table(table.directory)
    ingest(other, end=6)
    assert paths(committed.current(), table) == set(other.files())
    shutil.rmtree(table.directory)
    assert committed.current().files == ()


@pytest.mark.parametrize("path", ["../../etc/passwd", "date=2026-11-22/hour=10/../../../x.parquet", "a b.parquet"])
@pytest.mark.proves("telemetry-tables/commit-names-file-outside")
def test_commit_that_names_another_file_is_refused(table, path):
    ingest(table, end=4)
    commit = commit_file(table, 1)
    document = json.loads(commit.read_bytes())
    document["files"][0]["path"] = path
    commit.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(TableDamagedError, match="restore"):
        CommittedFiles(table.directory).current()


@pytest.mark.proves("telemetry-tables/directory-table-cannot-read")
def test_directory_that_cannot_be_read_is_an_error_until_it_can(table):
    committed = CommittedFiles(table.directory)
    ingest(table, end=4)
    with refusing_writes(table), pytest.raises(StorageError):
        committed.current()
    assert paths(committed.current(), table) == set(table.files())

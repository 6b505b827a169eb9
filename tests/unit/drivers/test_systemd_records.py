"""The environment files of the systemd driver: one worker each, taken and freed whole."""

from __future__ import annotations

import stat

import pytest

from osrdyne.drivers.systemd.records import EnvironmentFiles, Record
from osrdyne.errors import DriverUnavailableError
from osrdyne.protocol.names import Key, WorkerId

URI = "amqp://worker:secret@broker/"
RECORD = Record(Key('a\n"漢\0'), 2, WorkerId("w1"), "hash", "3.14", 1234.5)


@pytest.fixture
def files(tmp_path):
    return EnvironmentFiles(tmp_path / "osrdyne", "blue-")


def test_record_is_found_again_in_a_comment_line_of_a_private_file(files):
    assert files.create("blue-0-a", RECORD, 'A="1"\n', uri=URI)
    assert files.create("green-0-a", RECORD, "", uri=URI)  # of another pool
    (files.path / "blue-notes.env").write_text("A=1\n")
    assert EnvironmentFiles(files.path, "blue-").records() == {"blue-0-a": RECORD}
    file = files.path / "blue-0-a.env"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, files.path)] == [0o600, 0o700]
    first, rest = file.read_text().split("\n", 1)
    assert first.startswith("# {") and first.isascii()
    assert rest == 'A="1"\n'


def test_slot_is_freed_by_its_own_worker_only_and_leaves_no_file(files):
    files.create("blue-0-a", RECORD, "", uri=URI)
    files.remove("blue-0-a", WorkerId("w2"))
    assert files.read("blue-0-a") == RECORD
    files.remove("blue-0-a", RECORD.worker_id)
    assert list(files.path.iterdir()) == []


def test_second_creation_is_refused_and_changes_nothing(files):
    files.create("blue-0-a", RECORD, "", uri=URI)
    assert not files.create("blue-0-a", Record(Key("b"), 0, WorkerId("w2"), "", "", 0.0), "", uri=URI)
    assert files.read("blue-0-a") == RECORD
    assert sorted(file.name for file in files.path.iterdir()) == ["blue-0-a.env", "blue-0-a.uri"]


def test_uri_is_in_a_private_file_until_the_worker_has_started(files):
    files.create("blue-0-a", RECORD, 'A="1"\n', uri=URI)
    file = files.path / "blue-0-a.uri"
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (URI, 0o600)
    assert "secret" not in (files.path / "blue-0-a.env").read_text()
    files.mark_started("blue-0-a", RECORD)
    assert [path.name for path in files.path.iterdir()] == ["blue-0-a.env"]


def test_started_worker_is_marked_and_keeps_its_variables(files):
    files.create("blue-0-a", RECORD, 'A="1\r2\r\n漢"\n', uri=URI)
    files.mark_started("blue-0-a", RECORD)
    record = files.read("blue-0-a")
    assert record is not None and record.started
    assert (files.path / "blue-0-a.env").read_bytes().endswith('\nA="1\r2\r\n漢"\n'.encode())


def test_directory_that_others_can_write_to_is_refused(files):
    files.path.mkdir()
    files.path.chmod(0o777)
    with pytest.raises(DriverUnavailableError, match="another user"):
        files.prepare()

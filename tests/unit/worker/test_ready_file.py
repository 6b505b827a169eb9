"""The file that shows a platform that a worker takes requests."""

from __future__ import annotations

from structlog.testing import capture_logs

from osrdyne_worker.runtime.ready_file import NO_READY_FILE, ReadyFile


def test_ready_file_comes_and_goes(tmp_path):
    path = tmp_path / "ready"
    file = ReadyFile.from_variables({"WORKER_READY_FILE": str(path)})
    file.write()
    assert path.exists()
    for _ in range(2):
        file.delete()
        assert not path.exists()


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = ReadyFile.from_variables({"WORKER_READY_FILE": ""})
    file.write()
    file.delete()
    assert (file, list(tmp_path.iterdir())) == (NO_READY_FILE, [])


def test_file_that_cannot_be_written_is_reported(tmp_path):
    with capture_logs() as entries:
        ReadyFile(tmp_path / "missing" / "ready").write()
    assert [entry["event"] for entry in entries] == ["ready file cannot be written"]

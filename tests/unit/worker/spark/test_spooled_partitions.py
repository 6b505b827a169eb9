"""The partitions of a streamed DataFrame, without Spark: what stays if their job cannot begin."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from osrdyne_worker.spark.answers.streams import SpooledPartitions


def test_job_that_cannot_begin_leaves_no_thread_and_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    # Not `tmp_path`: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        monkeypatch.setattr(tempfile, "tempdir", name)

        def fail() -> None:
            assert [path.name for path in directory.rglob("*") if path.is_socket()] == ["rows"]
            raise ConnectionRefusedError("The JVM has ended.")

        context = SimpleNamespace(getLocalProperty=lambda name: "group", getConf=dict)
        with pytest.raises(ConnectionRefusedError):
            SpooledPartitions(context, SimpleNamespace(toJavaRDD=fail))
        assert list(directory.iterdir()) == []
    for thread in set(threading.enumerate()) - before:
        thread.join(120)
        assert not thread.is_alive()

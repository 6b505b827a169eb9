"""The partitions of a streamed DataFrame, without Spark: what happens if their job or a connection fails."""

from __future__ import annotations

import errno
import socket
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext

from osrdyne_worker.spark.answers import streams
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


class Rows:
    """An RDD whose job runs until `cancelled`. Its tasks are not simulated."""

    def __init__(self, *_: object) -> None:
        self.cancelled = threading.Event()

    def mapPartitionsWithIndex(self, function: object) -> Rows:
        return self

    def getNumPartitions(self) -> int:
        return 1

    def count(self) -> None:
        assert self.cancelled.wait(120)
        raise RuntimeError("The job was cancelled.")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    rows = Rows()
    monkeypatch.setattr("pyspark.core.rdd.RDD", lambda *_: rows)
    monkeypatch.setattr(SparkContext, "_gateway", None)
    return rows


def spooled(rows: Rows, **settings: str) -> SpooledPartitions:
    context = SimpleNamespace(
        getLocalProperty=lambda name: "group",
        getConf=lambda: settings,
        cancelJobGroup=lambda group: rows.cancelled.set(),
    )
    return SpooledPartitions(context, SimpleNamespace(toJavaRDD=lambda: None))


def test_connections_that_cannot_be_accepted_end_the_stream_with_the_reason(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks would wait, and the stream with them, until the deadline of the request."""

    class Full(socket.socket):
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(streams.socket, "socket", Full)
    partitions = spooled(rows)
    with pytest.raises(OSError, match="Too many open files"):
        next(partitions.messages())
    partitions.close()


def test_partition_that_cannot_be_stored_ends_the_stream_with_the_reason(rows: Rows, tmp_path: Path) -> None:
    partitions = spooled(rows, **{"spark.local.dir": str(tmp_path / "missing")})
    ours, theirs = socket.socketpair()
    with ours:
        partitions._store(theirs)
        with pytest.raises(FileNotFoundError, match="missing"):
            next(partitions.messages())
    partitions.close()

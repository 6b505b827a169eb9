"""The partitions of a DataFrame, without Spark: what happens if the JVM, a job or a connection ends."""

from __future__ import annotations

import errno
import socket
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark.util
import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import SparkContext

from osrdyne_worker.spark.answers import streams
from osrdyne_worker.spark.answers.arrow_batches import messages_by_partition
from osrdyne_worker.spark.answers.streams import SpooledPartitions


def test_job_that_cannot_begin_leaves_no_thread_and_no_socket(monkeypatch):
    before = set(threading.enumerate())
    # Not `tmp_path`: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        monkeypatch.setattr(tempfile, "tempdir", name)

        def fail():
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
def rows(monkeypatch):
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


def test_connections_that_cannot_be_accepted_end_the_stream(rows, monkeypatch):
    """The tasks would wait, and the stream with them, until the deadline of the request."""

    class Full(socket.socket):
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(streams.socket, "socket", Full)
    partitions = spooled(rows)
    with pytest.raises(OSError, match="Too many open files"):
        next(partitions.messages())
    partitions.close()


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError(), EOFError()])
def test_jvm_that_ends_while_it_sends_rows_is_a_lost_jvm(monkeypatch, error):
    """The SQL pipeline answers an error of its files. A request whose JVM is lost must be requeued instead."""

    def read(served, serializer):
        yield b"first"
        raise error

    monkeypatch.setattr(pyspark.util, "_local_iterator_from_socket", read)
    python_rdd = SimpleNamespace(toLocalIteratorAndServe=lambda rdd, prefetch: None)
    spark = SimpleNamespace(api=SimpleNamespace(python=SimpleNamespace(PythonRDD=python_rdd)))
    context: Any = SimpleNamespace(_jvm=SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(spark=spark))))
    messages = messages_by_partition(context, None, prefetch=True)
    assert next(messages) == b"first"
    with pytest.raises(Py4JNetworkError, match="lost"):
        next(messages)

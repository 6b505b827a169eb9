"""The rows of a DataFrame as Arrow record batches, in bounded memory. Used by the session factory for streamed answers.

With a local master, the tasks write their batches to this process, which stores them in temporary files and reads one
partition after the other. No task waits for a slow client, and neither the JVM nor Python holds a partition in memory.
On a cluster, Spark hands over one partition at a time, which the JVM of the driver holds in memory.
"""

from __future__ import annotations

import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.spark.answers.arrow_batches import decoded, messages_by_partition
from osrdyne_worker.spark.answers.results import PreparedQuery, prepare
from osrdyne_worker.spark.jobs import GROUP

MIN_FREE_BYTES = 1024**3
"""Bytes that the disk of the temporary files keeps free: a larger result ends with an error."""
BATCH_BYTES = 128 * 1024
"""Estimated bytes of a batch. Java's G1 collector stores an array of at least half a region (512 KiB in a heap of 1 GB)
apart from all others, in regions that it frees late: with batches of this size the heap grows far less."""
_TEXT_BYTES = 64
"""Estimated bytes of a text, list or object."""
CHECK_BYTES = 64 * 1024**2
"""Bytes between two checks of the free space."""
END_TIMEOUT = 30.0
"""Seconds to wait for a cancelled job."""
_ROWS_OF_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
_LENGTH = struct.Struct("!q")
_END = -1


@dataclass(frozen=True, slots=True)
class StreamedFrame:
    """A prepared query whose rows are to be streamed; `limit` None: all of them.

    `guard` calls a function that runs jobs of the query, and raises other errors in place of Spark's.
    """

    query: PreparedQuery
    limit: int | None = None
    guard: Callable[[Callable[[], Any]], Any] = lambda run: run()

    def toArrow(self) -> pa.Table:
        """All rows at once."""
        return self._frame.toArrow()

    @property
    def _frame(self) -> Any:
        # One row more, to know whether there are more.
        return self.query.frame if self.limit is None else self.query.frame.limit(self.limit + 1)


@dataclass(frozen=True, slots=True)
class FrameBatches:
    """The record batches of a DataFrame. `close` ends its jobs and must be called."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    limit: int | None
    close: Callable[[], None]


def is_streamable(session: Any) -> bool:
    """Whether the DataFrames of this session can be streamed; with Spark Connect they are collected."""
    return hasattr(session, "_jsparkSession")


def open_batches(value: Any) -> FrameBatches | None:
    """The batches of a DataFrame of Spark, or of a `StreamedFrame`; None for other values and with Spark Connect."""
    from pyspark.sql import DataFrame

    if isinstance(value, DataFrame):
        value = StreamedFrame(prepare(value))
    if not isinstance(value, StreamedFrame) or not is_streamable(value.query.frame.sparkSession):
        return None
    batches: FrameBatches = value.guard(partial(_open, value))
    return replace(batches, batches=_guarded(batches.batches, value.guard))


def _open(value: StreamedFrame) -> FrameBatches:
    frame = value._frame
    # The schema of `toArrow`; Spark plans no job for no rows.
    schema = frame.limit(0).toArrow().schema
    context = frame.sparkSession.sparkContext
    # Shuffles before the last stage run here.
    rdd = _with_small_batches(frame, schema).toArrowBatchRdd()
    if _is_local(context):
        spooled = SpooledPartitions(context, rdd)
        return FrameBatches(schema, decoded(spooled.messages(), schema), value.limit, spooled.close)
    # Without prefetch: a partition is computed only when the client wants its rows.
    messages = messages_by_partition(context, rdd, prefetch=False)
    return FrameBatches(schema, decoded(messages, schema), value.limit, lambda: None)


def _guarded(batches: Iterator[pa.RecordBatch], guard: Callable[[Callable[[], Any]], Any]) -> Iterator[pa.RecordBatch]:
    while (batch := guard(lambda: next(batches, None))) is not None:
        yield batch


def _is_local(context: Any) -> bool:
    """Whether the tasks run on this machine, with this user."""
    return parse_spark_master(str(context.master)).is_on_this_host


def _with_small_batches(frame: Any, schema: pa.Schema) -> Any:
    """The Java form of a DataFrame, with batches of about `BATCH_BYTES`; fewer rows that are configured are kept."""
    session = frame.sparkSession
    rows = max(1, BATCH_BYTES // max(1, sum(_estimated_bytes(kind) for kind in schema.types)))
    configured = int(session.conf.get(_ROWS_OF_BATCH))
    if 0 < configured <= rows:
        return frame._jdf
    # In a session of its own: other requests share this one.
    java_session = session._jsparkSession.cloneSession()
    analyzed = frame._jdf.queryExecution().analyzed()
    small = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(java_session, analyzed)
    java_session.conf().set(_ROWS_OF_BATCH, str(rows))
    return small


def _estimated_bytes(kind: pa.DataType) -> int:
    try:
        bits: int = kind.bit_width
    except ValueError:  # of no fixed width
        return _TEXT_BYTES
    return max(1, bits // 8)


class SpooledPartitions:
    """Runs one job whose tasks send their batches to this process, which stores them in temporary files.

    A partition is read when its task has ended: a task that fails and runs again sends the partition once more, and
    the first complete one counts.
    """

    def __init__(self, context: Any, rdd: Any) -> None:
        from pyspark import InheritableThread
        from pyspark.core.rdd import RDD

        self._context = context
        self._group = context.getLocalProperty(GROUP)
        self._changed = threading.Condition()
        self._partitions: dict[int, IO[bytes]] = {}
        self._closed = False
        self._error: Exception | None = None
        self._directory = str(context.getConf().get("spark.local.dir", tempfile.gettempdir())).split(",")[0]
        self._owned = ExitStack()
        # Only this user may connect. Not in Spark's directory: the path of a socket has at most 107 bytes.
        address = str(Path(self._owned.enter_context(tempfile.TemporaryDirectory(prefix="osrdyne-"))) / "rows")
        self._server = self._owned.enter_context(socket.socket(socket.AF_UNIX))
        self._server.bind(address)
        self._server.listen(128)
        threading.Thread(target=self._accept, name="stream-accept", daemon=True).start()
        try:
            messages: Any = RDD(rdd.toJavaRDD(), context, _complete_messages())
            rows = messages.mapPartitionsWithIndex(_sender(address))
            self._count = rows.getNumPartitions()
            # With the job group and the scheduler pool of this thread.
            self._job = InheritableThread(target=partial(self._run, rows), name="stream-job", daemon=True)
            self._job.start()
        except BaseException:
            # The thread that accepts connections would keep the socket and its directory until the worker ends.
            self._stop_server()
            raise

    def messages(self) -> Iterator[bytes]:
        """The batches of all partitions in their order, as messages of Arrow. Raises the error of the job."""
        for index in range(self._count):
            with self._changed:
                self._changed.wait_for(partial(self._ready, index))
                if self._error is not None:
                    raise self._error
                file = self._partitions.pop(index)
            with file:
                file.seek(0)
                while (head := file.read(_LENGTH.size)) and (length := _LENGTH.unpack(head)[0]) != _END:
                    yield file.read(length)

    def close(self) -> None:
        """Cancel the job if it runs, and delete the files."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._job.is_alive() and self._group is not None:
            with suppress(Exception):  # the JVM may have ended
                self._context.cancelJobGroup(self._group)
        # Tasks that send fail from now on.
        self._stop_server()
        self._job.join(END_TIMEOUT)
        with self._changed:
            for file in self._partitions.values():
                file.close()
            self._partitions.clear()

    def _stop_server(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._owned.close()

    def _ready(self, index: int) -> bool:
        return index in self._partitions or self._error is not None

    def _run(self, rows: Any) -> None:
        try:
            rows.count()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            # The first error is the cause: a job whose rows could not be stored fails as well.
            self._error = self._error or error
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                # Unless closed: such as too many open files. Tasks whose connections are not accepted would wait.
                if not self._closed:
                    self._fail(error)
                return
            threading.Thread(target=self._store, args=(connection,), name="stream-partition", daemon=True).start()

    def _store(self, connection: socket.socket) -> None:
        """Store what one task sends."""
        with connection, connection.makefile("rb", 1024 * 1024) as rows:
            try:
                # Without a name: the kernel removes it when this process ends, even if it is killed.
                file = tempfile.TemporaryFile(dir=self._directory, prefix="osrdyne-")  # noqa: SIM115 — kept open
            except OSError as error:
                self._fail(error)
                return
            try:
                index = self._copy(rows, file)
            except Exception as error:
                index = None
                if not self._closed:
                    self._fail(error)
            with self._changed:
                if index is None or self._closed or index in self._partitions:
                    file.close()
                    return
                self._partitions[index] = file
                self._changed.notify_all()
            with suppress(OSError):
                # The task ends once its partition is stored, so that the job ends after all of them.
                connection.sendall(b"1")

    def _copy(self, rows: Any, file: IO[bytes]) -> int | None:
        """Copy the messages of a partition; its index, or None if the task has failed before its end."""
        head = rows.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        index: int = _LENGTH.unpack(head)[0]
        unchecked = CHECK_BYTES
        while len(head := rows.read(_LENGTH.size)) == _LENGTH.size:
            file.write(head)
            length = _LENGTH.unpack(head)[0]
            if length == _END:
                file.flush()
                return index
            unchecked += length
            if unchecked >= CHECK_BYTES:
                unchecked = 0
                self._check_space()
            message = rows.read(length)
            if len(message) < length:
                return None
            file.write(message)
        return None

    def _check_space(self) -> None:
        if shutil.disk_usage(self._directory).free < MIN_FREE_BYTES:
            raise RequestError(
                "The disk of the worker has no room for the result (less than 1 GiB is free in spark.local.dir). Ask "
                "for less at once.",
                code=507,
                error_code="no_disk_space",
            )


def _complete_messages() -> Any:
    """The serializer that reads the messages of a partition in Spark's Python processes.

    Spark's own serializers treat the end of a connection as the end of the data: the rows that a failing task has
    produced so far would look like the whole partition. This one requires the mark at the end of the data.
    """
    from pyspark.serializers import NoOpSerializer

    # Nested: sent by value, as `_sender`.
    class CompleteMessages(NoOpSerializer):
        def load_stream(self, stream: Any) -> Iterator[bytes]:
            end_of_data = -1
            while len(head := stream.read(4)) == 4:
                length = int.from_bytes(head, "big", signed=True)
                if length == end_of_data:
                    return
                message = stream.read(length)
                if len(message) < length:
                    break
                yield message
            raise RuntimeError("the rows of the partition end too early")

    return CompleteMessages()


def _sender(address: str) -> Callable[[int, Iterable[bytes]], Iterable[int]]:
    """The function of a task, which sends the messages of its partition. Runs in Spark's Python processes."""
    end = _END

    # Nested, and with nothing of this module: so Spark sends it by value, to processes that lack this package.
    def send(index: int, messages: Iterable[bytes]) -> Iterable[int]:
        import socket
        import struct

        length = struct.Struct("!q")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(length.pack(index))
            for message in messages:
                connection.sendall(length.pack(len(message)))
                connection.sendall(message)
            connection.sendall(length.pack(end))
            if connection.recv(1) != b"1":
                raise OSError("the rows of the partition were not stored")
        return ()

    return send

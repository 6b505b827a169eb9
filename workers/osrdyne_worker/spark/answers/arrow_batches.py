"""The rows of a DataFrame as Arrow record batches, one partition after another. Used by pipelines for large results,
and for streamed answers on a cluster.

`toArrow` holds the whole result in the memory of JVM and Python; here each holds a few partitions at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

_UNKNOWN_SIZE = 2**60
"""Spark estimates sources of unknown size with its largest number."""


def arrow_batches(frame: Any) -> tuple[pa.Schema, Generator[pa.RecordBatch, None, None]]:
    """The schema, and the batches in the order of the rows; runs a job for each partition.

    `spark.driver.maxResultSize` limits each partition, not their sum. With Spark Connect, the result is collected
    first. The iterator raises Spark's error, and must be closed if it is not read to its end.
    """
    java_frame = getattr(frame, "_jdf", None)
    if java_frame is None:
        table = frame.toArrow()
        return table.schema, (batch for batch in table.to_batches())
    from pyspark.sql.pandas.types import to_arrow_schema

    large = frame.sparkSession.conf.get("spark.sql.execution.arrow.useLargeVarTypes", "false") == "true"
    schema = to_arrow_schema(frame.schema, timezone="UTC", prefers_large_types=large)
    messages = messages_by_partition(frame.sparkSession.sparkContext, frame._jdf.toArrowBatchRdd(), prefetch=True)
    return schema, decoded(messages, schema)


def messages_by_partition(context: Any, rdd: Any, *, prefetch: bool) -> Iterator[bytes]:
    """The messages of Arrow in an RDD of the JVM, in the order of its partitions. Runs a job for each partition.

    `prefetch`: the job of the next partition runs while one is read. A thread of the JVM that begins here runs the
    jobs: it inherits the job group and the scheduler pool of this thread. Raises Spark's error, and `Py4JNetworkError`
    if the connection to the JVM is lost.
    """
    from pyspark.serializers import NoOpSerializer
    from pyspark.util import _local_iterator_from_socket

    served = context._jvm.org.apache.spark.api.python.PythonRDD.toLocalIteratorAndServe(rdd, prefetch)
    try:
        yield from _local_iterator_from_socket(served, NoOpSerializer())
    except (OSError, EOFError) as error:
        # Callers would take an OSError for one of their own files.
        raise Py4JNetworkError("The connection to Spark's Java process was lost while it sent rows.") from error


def decoded(messages: Iterable[bytes], schema: pa.Schema) -> Generator[pa.RecordBatch, None, None]:
    for message in messages:
        yield pa.ipc.read_record_batch(pa.py_buffer(message), schema)


def estimated_bytes(frame: Any) -> int | None:
    """The size of the files or cached tables that a query returns unchanged; None if Spark cannot know the size.

    Only a query that returns all columns of all rows has an estimate: without statistics of the columns Spark assumes
    that a condition removes no row, and that a join multiplies them.
    """
    java_frame = getattr(frame, "_jdf", None)
    if java_frame is None:
        return None
    plan = java_frame.queryExecution().optimizedPlan()
    kind = plan.getClass().getSimpleName()
    while kind in ("Sort", "SubqueryAlias", "View"):
        plan = plan.children().apply(0)
        kind = plan.getClass().getSimpleName()
    if kind not in ("LogicalRelation", "InMemoryRelation", "LocalRelation"):
        return None
    size = int(plan.stats().sizeInBytes())
    return size if size < _UNKNOWN_SIZE else None

"""The rows of a DataFrame, partition by partition, without Spark: what a JVM that ends in between causes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyspark.util
import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]

from osrdyne_worker.spark.answers.arrow_batches import messages_by_partition


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError(), EOFError()])
def test_jvm_that_ends_while_it_sends_rows_is_no_error_of_the_workers_own_files(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The SQL pipeline answers an error of its files. A request whose JVM is lost must be requeued instead."""

    def read(served: object, serializer: object) -> Iterator[bytes]:
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

"""`RabbitStream`, the data source with the name `rabbitmq-stream` in Spark.

Spark creates it in short-lived Python processes, pickles it into the plan and copies it to the executors. So it holds
only the options. Each reader opens its own connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.errors import ConfigurationError
from osrdyne_sources.rabbit_stream.broker import BlockingBroker
from osrdyne_sources.rabbit_stream.offsets import Split, ends, resolve, split
from osrdyne_sources.rabbit_stream.options import Options, parse_options
from osrdyne_sources.rabbit_stream.rows import SCHEMA, to_batch

_BATCH_ROWS = 10_000
_BATCH_BYTES = 16 * 1024 * 1024


@dataclass
class SplitPartition(InputPartition):
    """What one task reads."""

    value: Split


class RabbitStream(DataSource):
    """Reads RabbitMQ streams, in batch and with Structured Streaming. `spark.dataSource.register(RabbitStream)`."""

    @classmethod
    def name(cls) -> str:
        return "rabbitmq-stream"

    def __init__(self, options: Any) -> None:
        """Check the options. Raises `ConfigurationError`."""
        self._options = parse_options(options)

    def schema(self) -> StructType:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        _check(schema)
        return _BatchReader(self._options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Raises `ConfigurationError` before PySpark 4.2, where readers could not limit a batch."""
        try:
            from osrdyne_sources.rabbit_stream.streaming import StreamReader
        except ImportError:
            raise ConfigurationError("Structured Streaming from rabbitmq-stream needs PySpark 4.2 or later.") from None
        _check(schema)
        return StreamReader(self._options)


class _BatchReader(DataSourceReader):
    def __init__(self, options: Options) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        with BlockingBroker(self._options) as broker:
            bounds = broker.bounds()
        start = resolve(self._options.starting_offsets, bounds)
        stop = resolve(self._options.ending_offsets, bounds)
        for option, offsets in (("startingOffsets", start), ("endingOffsets", stop)):
            for stream, end in ends(bounds, {}).items():
                if offsets[stream] > end:
                    raise ConfigurationError(
                        f"The option {option}: the stream {stream} ends at offset {end}, before {offsets[stream]}."
                    )
        start = {stream: min(offset, stop[stream]) for stream, offset in start.items()}
        return to_partitions(split(start, stop, self._options.max_offsets_per_partition))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, partition)


def to_partitions(splits: Sequence[Split]) -> list[InputPartition]:
    return [SplitPartition(one) for one in splits]


def read_partition(options: Options, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a partition as Arrow batches; none for the partition that Spark adds to an empty batch."""
    wanted = partition.value
    if not isinstance(wanted, Split):
        return
    waiting: list[StreamMessage] = []
    size = 0
    # Spark may stop reading at any time: the reader of the range is then closed before its connection.
    with BlockingBroker(options) as broker, closing(broker.read(wanted.stream, wanted.wanted)) as several:
        for messages in several:
            waiting += messages
            size += sum(len(one.body) for one in messages)
            if len(waiting) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                yield to_batch(wanted.stream, waiting)
                waiting, size = [], 0
        if waiting:
            yield to_batch(wanted.stream, waiting)


def _check(schema: StructType) -> None:
    if schema != SCHEMA:
        raise ConfigurationError("rabbitmq-stream has a fixed schema: leave out schema(), and select columns instead.")

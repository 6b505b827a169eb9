"""The reader of Structured Streaming. It needs PySpark 4.2, the first with limits for Python readers.

Spark keeps the driver's reader in one process for as long as the query runs, with one connection. Tasks have readers of
their own, which only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from osrdyne_sources.rabbit_stream.broker import BlockingBroker
from osrdyne_sources.rabbit_stream.offsets import Bounds, ends, next_end, resolve, split
from osrdyne_sources.rabbit_stream.options import Options
from osrdyne_sources.rabbit_stream.source import read_partition, to_partitions


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are those of `offsets.py`. Nothing is committed to RabbitMQ: the checkpoint has the position."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._broker: BlockingBroker | None = None
        self._target: Bounds | None = None
        self._seen: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tasks get a copy of the reader, and no connection.
        return {**self.__dict__, "_broker": None}

    def initialOffset(self) -> dict[str, int]:
        return resolve(self._options.starting_offsets, self._connected().bounds())

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._connected().bounds()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return the end of the next batch. The ends of the streams are read once for a run of `availableNow`."""
        self._seen = ends(self._target or self._connected().bounds(), start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return next_end(start, self._seen, most, fail_on_data_loss=self._options.fail_on_data_loss)

    def reportLatestOffset(self) -> dict[str, int] | None:
        return self._seen

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return to_partitions(split(start, end, self._options.max_offsets_per_partition))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(self._options, partition)

    def stop(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def _connected(self) -> BlockingBroker:
        self._broker = self._broker or BlockingBroker(self._options)
        return self._broker

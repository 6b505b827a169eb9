"""Tables as the parts of a streamed answer, made one at a time. Pure; needs pyarrow, so it is imported on first use.

The parts, one after the other, are one Arrow IPC stream. Source: docs/reference/protocol/streams.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pyarrow as pa

from osrdyne.protocol.messages import ARROW_TYPE, Response
from osrdyne.protocol.streams import PART_BYTES, ROWS_HEADER
from osrdyne_worker.app.call import Answer
from osrdyne_worker.app.codec import OpenBatches
from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.app.tables import invalid_answer, known_reader, reader_of


class ArrowStream:
    """The parts of one answer. One thread at a time may use it.

    `batches` is read as far as `limit` rows (None: to its end). With `at_once`, each batch becomes at least one part,
    as soon as the iterator returns it; otherwise small batches are combined. `close` is called once, at the end.
    """

    def __init__(
        self,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
        *,
        limit: int | None,
        answer: Answer | None = None,
        at_once: bool = False,
        part_bytes: int = PART_BYTES,
        max_bytes: int = 4 * PART_BYTES,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows = 0
        self.parts = 0
        self.truncated = False
        self._answer = answer or Answer()
        self._schema = schema
        self._batches = iter(batches)
        self._limit = limit
        self._at_once = at_once
        self._part_bytes = min(part_bytes, max_bytes)
        self._max_bytes = max_bytes
        self._close: Callable[[], None] | None = close
        self._sink = _Sink()
        self._has_rows = False
        self._writer = pa.ipc.new_stream(self._sink, schema)
        self._parts = self._make_parts()

    def next_part(self) -> bytes | None:
        """The next part; None after the last one. Raises what the iterator raises, and `RequestError`."""
        return next(self._parts, None)

    def end(self) -> Response:
        """The final reply, once there are no further parts: the end of the Arrow stream."""
        self._writer.close()
        headers = {
            ROWS_HEADER: self.rows,
            "x-truncated": json.dumps(self.truncated),
            **self._answer.headers,
        }
        return Response(body=self._sink.take(), content_type=ARROW_TYPE, code=self._answer.code, headers=headers)

    def close(self) -> None:
        """Close the iterator and what belongs to it; may be called again."""
        close, self._close = self._close, None
        if close is not None:
            self._parts.close()
            close()

    def _make_parts(self) -> Generator[bytes]:
        for batch in self._limited():
            for piece in _pieces(batch, self._part_bytes):
                size = pa.ipc.get_record_batch_size(piece)
                if self._has_rows and self._sink.size + size > self._part_bytes:
                    yield self._take()
                self._writer.write_batch(piece)
                self._has_rows = True
                self.rows += piece.num_rows
            if self._at_once and self._has_rows:
                yield self._take()
        if self._has_rows:
            yield self._take()

    def _take(self) -> bytes:
        self._has_rows = False
        part = self._sink.take()
        self.parts += 1
        if len(part) > self._max_bytes:
            raise RequestError(
                f"A row of the answer needs {len(part)} bytes; a message has at most {self._max_bytes}.",
                code=413,
                error_code="answer_too_large",
                details={"size_bytes": len(part), "max_bytes": self._max_bytes},
            )
        return part

    def _limited(self) -> Iterator[pa.RecordBatch]:
        left = self._limit
        for batch in self._batches:
            if not batch.schema.equals(self._schema):
                raise invalid_answer("the record batches differ in their schemas")
            if left is not None and batch.num_rows > left:
                self.truncated = True
                if left:
                    yield batch.slice(0, left)
                return
            if left is not None:
                left -= batch.num_rows
            if batch.num_rows:
                yield batch


def _pieces(batch: pa.RecordBatch, part_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch in slices of at most `part_bytes`, or of one row."""
    waiting = [batch]
    while waiting:
        piece = waiting.pop()
        if piece.num_rows <= 1 or pa.ipc.get_record_batch_size(piece) <= part_bytes:
            yield piece
        else:
            half = piece.num_rows // 2
            waiting += [piece.slice(half), piece.slice(0, half)]


class _Sink:
    """A file for pyarrow's writer, whose content can be taken out between two batches."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._written = 0
        self.size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        # Copied: pyarrow uses its buffer again.
        chunk = bytes(data)
        self._chunks.append(chunk)
        self.size += len(chunk)
        self._written += len(chunk)
        return len(chunk)

    def take(self) -> bytes:
        content = b"".join(self._chunks)
        self._chunks.clear()
        self.size = 0
        return content

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Nothing is buffered elsewhere."""

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def open_stream(
    value: Any, *, limit: int | None, max_bytes: int, open_batches: OpenBatches | None = None
) -> tuple[ArrowStream | None, Any]:
    """The stream of a table or of an iterator of record batches, also in an `Answer`; otherwise None and an equivalent
    of `value`.

    Raises `RequestError` (500) for a table without an Arrow form, and what the iterator raises for its first value.
    """
    answer = value if isinstance(value, Answer) else Answer(value)
    body = answer.body
    if answer.content_type not in (None, ARROW_TYPE):
        return None, value
    frame = None if open_batches is None else open_batches(body)
    if frame is not None:
        limits = [one for one in (limit, frame.limit) if one is not None]
        stream = ArrowStream(
            frame.schema,
            frame.batches,
            limit=min(limits, default=None),
            answer=answer,
            max_bytes=max_bytes,
            close=frame.close,
        )
        return stream, value
    if not isinstance(body, Iterator) or hasattr(type(body), "__arrow_c_stream__"):
        reader = reader_of(body)
        if reader is None:
            return None, value
        return ArrowStream(reader.schema, reader, limit=limit, answer=answer, max_bytes=max_bytes), value
    close = getattr(body, "close", lambda: None)
    for first in body:
        reader = reader_of(first)
        if reader is None:
            return None, replace(answer, body=chain([first], body))
        batches = chain.from_iterable(chain([reader], map(known_reader, body)))
        stream = ArrowStream(
            reader.schema, batches, limit=limit, answer=answer, at_once=True, max_bytes=max_bytes, close=close
        )
        return stream, value
    return None, replace(answer, body=iter(()))

"""A streamed answer as the client receives it: the order of its parts, and their decoding. Pure; used by `aio`.

A request whose worker dies is delivered again, and its stream starts again, perhaps with the rows in another order. The
new stream replaces the old one as long as the caller has received no part. After that the call fails: otherwise the
caller would receive rows twice, or miss some. Source: docs/reference/protocol/streams.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from osrdyne.client.errors import StreamInterruptedError
from osrdyne.client.reply import Reply
from osrdyne.errors import ConfigurationError, InvalidMessageError
from osrdyne.protocol.messages import ARROW_TYPE
from osrdyne.protocol.streams import ATTEMPT_HEADER, Grant, PartName

_RESTARTED = "The stream of the answer started again, in another worker, after some rows had been received."
_MISSING = "A part of the streamed answer was lost."


class PartQueue:
    """The parts of one call. `arrived` and `ends` take its replies, in their order, and raise `StreamInterruptedError`;
    `next` waits for a part."""

    def __init__(self, *, credit: int) -> None:
        self.handed_out = False
        """Whether the caller has received a part: from then on another stream cannot replace this one."""
        self.worker_id = ""
        self._credit = credit
        self._stream_id: str | None = None
        self._attempt = 0
        self._former: set[str] = set()
        self._received = 0
        self._consumed = 0
        self._parts: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = False

    def repeat(self) -> None:
        """Prepare for the request to be sent, perhaps again: its workers then count their attempts from the beginning.

        Raises `StreamInterruptedError` if the caller has received a part.
        """
        self._begin(None, 0)

    def arrived(self, reply: Reply) -> None:
        """Store a non-terminating reply."""
        name = PartName.of(reply.headers, final=False)
        if name is None or self._is_former(name, reply):
            return  # progress of the handler, or late parts of an earlier attempt
        self._follow(name, reply)
        if name.number != self._received + 1:
            raise StreamInterruptedError(_MISSING, reply=reply)
        self._received += 1
        self._parts.append(reply.body)
        self._changed.set()

    def ends(self, reply: Reply) -> bool:
        """Whether this terminating reply ends the call; False for one of an earlier attempt."""
        name = PartName.of(reply.headers, final=True)
        if name is not None and self._is_former(name, reply):
            return False
        if not reply.ok:
            return True
        if name is not None:
            self._follow(name, reply)
            if name.number != self._received:
                raise StreamInterruptedError(_MISSING, reply=reply)
        elif self._stream_id is not None:  # another worker has answered in one message
            self._begin(None, 0)
        return True

    def end(self) -> None:
        """Note that no further reply comes."""
        self._ended = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """Wait for the next part; None after the last one."""
        while not self._parts:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        self.handed_out = True
        return self._parts.popleft()

    def consumed(self) -> None:
        """Note that the caller has processed the part that `next` returned."""
        self._consumed += 1

    @property
    def grant(self) -> Grant | None:
        """The present credit of the worker of the stream; None without a stream."""
        if self._stream_id is None or self._ended:
            return None
        return Grant(self._stream_id, self._consumed + self._credit)

    def _is_former(self, name: PartName, reply: Reply) -> bool:
        if name.stream_id == self._stream_id:
            return False
        return name.stream_id in self._former or _attempt_of(reply) < self._attempt

    def _follow(self, name: PartName, reply: Reply) -> None:
        """Switch to the stream of this reply, unless it is the present one."""
        if name.stream_id != self._stream_id:
            self._begin(name.stream_id, _attempt_of(reply))
        self.worker_id = reply.worker_id or ""

    def _begin(self, stream_id: str | None, attempt: int) -> None:
        if self.handed_out:
            raise StreamInterruptedError(_RESTARTED)
        if self._stream_id is not None:
            self._former.add(self._stream_id)
        self._stream_id, self._attempt = stream_id, attempt
        self._received = self._consumed = 0
        self._parts.clear()


def _attempt_of(reply: Reply) -> int:
    attempt = reply.headers.get(ATTEMPT_HEADER)
    return attempt if isinstance(attempt, int) else 0


def require_arrow(reply: Reply) -> None:
    """Raise `InvalidMessageError` if the final reply of a call has another type than Arrow."""
    if reply.body and reply.content_type != ARROW_TYPE:
        raise InvalidMessageError(
            f"The content type of the reply is {reply.content_type or 'missing'}, not Arrow: the handler of this path "
            "does not return a table."
        )


class BatchDecoder:
    """Record batches from the parts of an Arrow IPC stream. Raises `ConfigurationError` without pyarrow."""

    def __init__(self) -> None:
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ConfigurationError("Reading Arrow needs pyarrow: pip install 'osrdyne[spark]'.") from error
        self._pa = pa
        self._source = _Parts()
        self._reader: Any = None
        self._is_empty = True

    def decode(self, part: bytes) -> Iterator[Any]:
        """The `pyarrow.RecordBatch`es of the next part; one without rows for an empty table, at its end.

        Raises `InvalidMessageError`.
        """
        self._source.feed(part)
        try:
            if self._reader is None and part:
                self._reader = self._pa.ipc.open_stream(self._pa.PythonFile(self._source, mode="r"))
            while self._source.left:
                try:
                    batch = self._reader.read_next_batch()
                except StopIteration:
                    if self._is_empty:
                        yield self._pa.RecordBatch.from_pylist([], schema=self._reader.schema)
                    return
                self._is_empty = False
                yield batch
        except (self._pa.ArrowInvalid, OSError) as error:
            raise InvalidMessageError("The body of the reply is not an Arrow stream.") from error


class _Parts:
    """A file-like object over the parts that were fed to it; a part ends where a message of Arrow ends."""

    def __init__(self) -> None:
        self._part = memoryview(b"")
        self.closed = False

    @property
    def left(self) -> int:
        return len(self._part)

    def feed(self, part: bytes) -> None:
        self._part = memoryview(part)

    def read(self, size: int = -1) -> bytes:
        size = len(self._part) if size < 0 else size
        found, self._part = self._part[:size], self._part[size:]
        return bytes(found)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

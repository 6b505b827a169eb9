"""Snapshots of state that changes often and must survive a restart and a change of leader, such as that of circuits.

A subsystem reads its snapshot when a term begins, and saves a new one after changes. Changes after the latest snapshot
are lost with the leader; each subsystem chooses its interval accordingly. The broker keeps only the latest snapshot
(`broker.queues.snapshots`). Documents that operators write are stored in several versions instead
(`pool.routing.manifest_store`).
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from osrdyne.aio.tasks import off_loop
from osrdyne.config.types import size_text
from osrdyne.errors import BrokerError, LeadershipLostError, ManagementUnavailableError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.logs import Logger, get_logger

MAX_SNAPSHOT_BYTES = 8 * 2**20  # Compressed; RabbitMQ 4 refuses messages of more than 16 MiB.
MAX_TEXT_BYTES = 128 * 2**20  # A small message of another program could otherwise unpack to any size.

S = TypeVar("S")


class SnapshotStorage(Protocol):
    """The storage of the latest snapshot of one name: a queue of the broker."""

    @property
    def name(self) -> str: ...

    async def read(self) -> bytes | None:
        """The latest snapshot of an earlier term; None without one."""
        ...

    async def write(self, content: bytes) -> None:
        """Replace the snapshot. Raises `LeadershipLostError` if the term is over: then the caller must not act on the
        state."""
        ...


class SnapshotStore(Generic[S]):
    """The snapshots of one subsystem.

    `encode` converts a state to JSON values, `parse` converts them back. It raises `InvalidDocumentError` if it cannot:
    then the whole snapshot is refused, and the subsystem begins without one. Both are called in a thread.
    """

    def __init__(
        self, storage: SnapshotStorage, *, pool: str, encode: Callable[[S], object], parse: Callable[[object], S]
    ) -> None:
        self._storage = storage
        self._encode = encode
        self._parse = parse
        self._saving = asyncio.Lock()
        self._size = 0
        self._log: Logger = get_logger("snapshots", pool=pool, snapshot=storage.name)

    async def load(self) -> S | None:
        """The state that an earlier leader saved last; None without one, or if it cannot be read. Raises
        `ManagementUnavailableError`: whether there is one is not known."""
        try:
            content = await self._storage.read()
        except (LeadershipLostError, ManagementUnavailableError):
            raise  # the caller tries again
        except BrokerError as error:
            self._log.warning("snapshot not available, beginning without it", error=str(error))
            return None
        if content is None:
            return None
        try:
            return await asyncio.to_thread(self._read, content)
        except (InvalidDocumentError, ValueError, RecursionError) as error:
            self._log.warning("snapshot cannot be read, beginning without it", reason=str(error))
            return None

    async def save(self, state: S) -> bool:
        """Save a state, which must not change any more. False, with a warning, if RabbitMQ does not take it.

        A leader that gets the token after this has returned true reads this state or a later one. Raises
        `LeadershipLostError` if the term is over.
        """
        # One at a time, in the order of the calls: a snapshot must never replace a later one.
        async with self._saving:
            content = await off_loop(self._size, lambda: _pack(self._encode(state)))
            self._size = 4 * len(content)  # of the next one, which is about as large
            if len(content) > MAX_SNAPSHOT_BYTES:
                size, limit = size_text(len(content)), size_text(MAX_SNAPSHOT_BYTES)
                self._log.warning("snapshot too large, not saved", size=size, limit=limit)
                return False
            try:
                await self._storage.write(content)
            except LeadershipLostError:
                raise
            except BrokerError as error:
                # A lost connection ends the term anyway. Anything else concerns this queue alone.
                self._log.warning("snapshot not saved", error=str(error))
                return False
            return True

    def _read(self, content: bytes) -> S:
        return self._parse(_unpack(content))


def _pack(value: object) -> bytes:
    return zlib.compress(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), 6)


def _unpack(content: bytes) -> object:
    """Raises `ValueError` if the content is damaged or too large."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(content, MAX_TEXT_BYTES)
    except zlib.error as error:
        raise ValueError("the content is damaged") from error
    if not unpacker.eof:
        raise ValueError("the content is damaged or too large")
    return json.loads(text)

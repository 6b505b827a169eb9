"""The positions that readers of the log have stored, one global parameter of RabbitMQ for each reader.

These positions are only shown: in `osrdyne telemetry lag`, the API and metrics. The position at which a reader resumes
is stored with its results, in the same transaction or commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

READER = re.compile(r"[a-z0-9_-]{1,64}")


class ListedParameters(Protocol):
    """Global parameters of RabbitMQ, which can be listed."""

    async def get_global_parameter(self, name: str) -> object | None: ...

    async def put_global_parameter(self, name: str, value: object) -> None: ...

    async def list_global_parameters(self, prefix: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class ReaderPosition:
    """The position of one reader. `offsets`: the next offset to read, by partition, without partitions that it has not
    begun. `at`: when it stored them, in seconds since the epoch."""

    reader: str
    offsets: Mapping[int, int]
    at: float


class ReaderPositions(Protocol):
    """A source of the positions of readers."""

    async def load(self) -> list[ReaderPosition]: ...


class PositionStore:
    """The positions of all readers of one pool's log."""

    def __init__(self, parameters: ListedParameters, *, pool: str) -> None:
        self._parameters = parameters
        self._pool = pool

    async def save(self, position: ReaderPosition) -> None:
        """Store a position. Call it at most once in a few seconds: RabbitMQ writes each to disk on every node. Raises
        `BrokerError`, and ValueError for a name that is not `[a-z0-9_-]{1,64}`."""
        await self._parameters.put_global_parameter(*parameter_of(position, pool=self._pool))

    async def load(self) -> list[ReaderPosition]:
        """The positions of all readers, by name. Raises `BrokerError`."""
        found, prefix = [], _prefix(self._pool)
        for name in sorted(await self._parameters.list_global_parameters(prefix)):
            reader = name.removeprefix(prefix)
            # Only a pool with an id such as "P-telemetry-x" has parameters that could be taken for readers of pool P.
            if READER.fullmatch(reader) is not None:
                position = parse_position(reader, await self._parameters.get_global_parameter(name))
                if position is not None:
                    found.append(position)
        return found


class LivePositions:
    """Stored positions, and newer positions of tables from the answers to `/ingest`.

    `tables`: readers that are listed before they have stored a position; they begin at the first offset.
    """

    def __init__(self, store: PositionStore, *, tables: Iterable[str], time: Callable[[], float]) -> None:
        self._store = store
        self._time = time
        self._learned: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in tables}
        self._unsaved: set[str] = set()

    def note(self, table: str, partition: int, offset: int, *, is_saved: bool) -> bool:
        """Note the next offset of a partition. `is_saved`: the table has stored it. Returns whether to call `save`."""
        learned = self._learned[table]
        if learned.get(partition, (None, 0.0))[0] != offset and not is_saved:
            self._unsaved.add(table)
        learned[partition] = (offset, self._time())
        return table in self._unsaved

    async def load(self) -> list[ReaderPosition]:
        """The positions of all readers, by name. Raises `BrokerError`."""
        stored = {one.reader: one for one in await self._store.load()}
        stored = {name: ReaderPosition(name, {}, 0.0) for name in self._learned} | stored
        return [self._merged(stored[name]) for name in sorted(stored)]

    async def save(self) -> None:
        """Store the changed positions. Raises `BrokerError`."""
        unsaved = sorted(self._unsaved)
        if unsaved:
            loaded = {one.reader: one for one in await self.load()}
            for name in unsaved:
                # Before the call: a position that is noted during it is stored next time.
                self._unsaved.discard(name)
                try:
                    await self._store.save(loaded[name])
                except BaseException:
                    self._unsaved.add(name)
                    raise

    def _merged(self, stored: ReaderPosition) -> ReaderPosition:
        """Of both offsets the later one by time, not the greater: a table that was moved begins again at lower ones."""
        learned = self._learned.get(stored.reader, {})
        newer = {partition: offset for partition, (offset, at) in learned.items() if at >= stored.at}
        latest = max((at for _, at in learned.values()), default=0.0)
        return ReaderPosition(stored.reader, {**stored.offsets, **newer}, max(stored.at, latest))


def parameter_of(position: ReaderPosition, *, pool: str) -> tuple[str, dict[str, object]]:
    """The name and the value of the global parameter for a position. Raises ValueError for a name that is not
    `[a-z0-9_-]{1,64}`."""
    if READER.fullmatch(position.reader) is None:
        raise ValueError(f"{position.reader!r} is not the name of a reader: use a-z, 0-9, _ and -")
    offsets = {str(partition): offset for partition, offset in position.offsets.items()}
    return f"{_prefix(pool)}{position.reader}", {"offsets": offsets, "at": position.at}


def parse_position(reader: str, value: object) -> ReaderPosition | None:
    """Parse a stored position; None if it was removed meanwhile, or another program wrote an invalid one."""
    if not isinstance(value, dict) or not isinstance(value.get("offsets"), dict):
        return None
    try:
        at = value.get("at")
        offsets = {
            int(partition): offset
            for partition, offset in value["offsets"].items()
            if str(partition).isdecimal() and isinstance(offset, int) and offset >= 0
        }
        return ReaderPosition(reader, offsets, float(at) if isinstance(at, int | float) else 0.0)
    except (OverflowError, ValueError):  # a number beyond what Python converts
        return None


def _prefix(pool: str) -> str:
    return f"osrdyne-{pool}-telemetry-"

"""A store of last values in a database: values and positions of the reader, changed in one transaction.

The statements are the same for SQLite and PostgreSQL. All calls block; a store is used by one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from osrdyne.errors import LastValueStoreError
from osrdyne.telemetry.last_values.values import Changes, Counts, LastValue, with_written

VALUES, POSITIONS = "osrdyne_last_values", "osrdyne_last_value_positions"
_COLUMNS = ("pool", *LastValue._fields)
_COUNTS = tuple(Counts.__dataclass_fields__)
_ORDER = ("ts", "log_partition", "log_offset", "log_index")
_TEXTS = frozenset(
    LastValue._fields.index(name)
    for name in ("key", "series", "value_text", "quality", "attributes", "message_id", "kind")
)

_UPSERT = (
    f"INSERT INTO {VALUES} ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "
    f"ON CONFLICT (pool, key, series) DO UPDATE SET {', '.join(f'{one} = excluded.{one}' for one in _COLUMNS[3:])} "
    f"WHERE ({', '.join(f'excluded.{one}' for one in _ORDER)}) > ({', '.join(f'{VALUES}.{one}' for one in _ORDER)})"
)
_ADVANCE = (
    f"INSERT INTO {POSITIONS} (pool, log_partition, next_offset, {', '.join(_COUNTS)}) "
    f"VALUES (?, ?, ?, {', '.join('?' * len(_COUNTS))}) "
    "ON CONFLICT (pool, log_partition) DO UPDATE SET next_offset = excluded.next_offset, "
    + ", ".join(f"{one} = {POSITIONS}.{one} + excluded.{one}" for one in _COUNTS)
)
_POSITIONS = f"SELECT log_partition, next_offset FROM {POSITIONS} WHERE pool = ?"
_TOTALS = f"SELECT {', '.join(f'COALESCE(SUM({one}), 0)' for one in _COUNTS)} FROM {POSITIONS} WHERE pool = ?"
_FIND = f"SELECT {', '.join(_COLUMNS[1:])} FROM {VALUES} WHERE pool = ? AND key = ?"


class LastValueStore(ABC):
    """The store of one pool. `create`: create missing tables, as the reader does. Each method raises
    `LastValueStoreError` if the database cannot be used; the next call connects again."""

    TEXT = "TEXT"
    REAL = "REAL"

    def __init__(self, *, pool: str, create: bool) -> None:
        self._pool = pool
        self._creates = create
        self._connection: Any = None

    def positions(self) -> dict[int, int]:
        """The next offset to read, by partition; without partitions that no message was read from."""
        with self._transaction() as cursor:
            cursor.execute(self._sql(_POSITIONS), (self._pool,))
            return {int(partition): int(offset) for partition, offset in cursor.fetchall()}

    def write(self, changes: Sequence[Changes]) -> Counts:
        """Write newer values and the positions in one transaction. Returns the outcomes of all events.

        Killed before the commit: the database has neither, and the messages are read again. Killed after it: the
        database has both.
        """
        total = Counts()
        with self._transaction(writes=True) as cursor:
            for one in changes:
                rows = [(self._pool, *map(self._encoded, enumerate(value))) for value in _in_order(one.values)]
                written = 0
                if rows:
                    cursor.executemany(self._sql(_UPSERT), rows)
                    written = cursor.rowcount
                counts = with_written(one.counts, given=len(rows), written=written)
                added = tuple(getattr(counts, name) for name in _COUNTS)
                cursor.execute(self._sql(_ADVANCE), (self._pool, one.partition, one.next_offset, *added))
                total = Counts(*(getattr(total, name) + number for name, number in zip(_COUNTS, added, strict=True)))
        return total

    def find(self, key: str, *, series: str | None, after: str | None, limit: int) -> list[LastValue]:
        """At most `limit` last values of a key, in the order of series: of one series, or of those after a series."""
        statement, parameters = _FIND, [self._pool, self._encode(key)]
        if series is not None:
            statement += " AND series = ?"
            parameters.append(self._encode(series))
        if after is not None:
            statement += " AND series > ?"
            parameters.append(self._encode(after))
        with self._transaction() as cursor:
            cursor.execute(self._sql(f"{statement} ORDER BY series LIMIT ?"), (*parameters, limit))
            return [LastValue(*map(self._decoded, enumerate(row))) for row in cursor.fetchall()]

    def find_keys(self, text: str, *, is_prefix: bool, limit: int) -> list[LastValue]:
        """At most `limit` last values of the key `text`, or of all keys that begin with it, in the order of the
        database."""
        statement, parameters = _FIND, [self._pool, self._encode(text)]
        if is_prefix:
            # A range of the primary key: LIKE would have wildcards, and would read all keys.
            statement = statement.replace("key = ?", "key >= ?")
            if (following := _following(self._encode(text))) is not None:
                statement += " AND key < ?"
                parameters.append(following)
        with self._transaction() as cursor:
            cursor.execute(self._sql(f"{statement} ORDER BY key, series LIMIT ?"), (*parameters, limit))
            return [LastValue(*map(self._decoded, enumerate(row))) for row in cursor.fetchall()]

    def totals(self) -> Counts:
        """The outcomes of all events since the store was created."""
        with self._transaction() as cursor:
            cursor.execute(self._sql(_TOTALS), (self._pool,))
            return Counts(*map(int, cursor.fetchone()))

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    @abstractmethod
    def _connect(self) -> Any:
        """Open a connection of DB-API 2.0, with the tables."""

    @abstractmethod
    def _translated(self, error: Exception) -> LastValueStoreError | None:
        """Cause and remedy for an error of the database; None for any other error."""

    @abstractmethod
    def _begin(self, cursor: Any, *, writes: bool) -> None:
        """Begin a transaction."""

    def _sql(self, statement: str) -> str:
        """A statement in the dialect of the database."""
        return statement

    def _encode(self, text: str) -> str:
        """A text as the database stores it."""
        return text

    def _decode(self, text: str) -> str:
        return text

    @property
    def _tables(self) -> tuple[str, ...]:
        text, real = self.TEXT, self.REAL
        return (
            f"CREATE TABLE IF NOT EXISTS {VALUES} (pool {text} NOT NULL, key {text} NOT NULL, series {text} NOT NULL, "
            f"ts BIGINT NOT NULL, sent_ts BIGINT, kind {text} NOT NULL, value {real}, value_text {text}, "
            f"quality {text}, attributes {text}, enqueued BIGINT NOT NULL, log_partition BIGINT NOT NULL, "
            f"log_offset BIGINT NOT NULL, log_index BIGINT NOT NULL, message_id {text}, "
            "PRIMARY KEY (pool, key, series))",
            f"CREATE TABLE IF NOT EXISTS {POSITIONS} (pool {text} NOT NULL, log_partition BIGINT NOT NULL, "
            f"next_offset BIGINT NOT NULL, {', '.join(f'{one} BIGINT NOT NULL' for one in _COUNTS)}, "
            "PRIMARY KEY (pool, log_partition))",
        )

    def _encoded(self, column: tuple[int, Any]) -> Any:
        number, value = column
        return self._encode(value) if number in _TEXTS and value is not None else value

    def _decoded(self, column: tuple[int, Any]) -> Any:
        number, value = column
        return self._decode(value) if number in _TEXTS and value is not None else value

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[Any]:
        """A cursor in a transaction that is committed at the end. After an error the connection is closed."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            cursor = self._connection.cursor()
            try:
                self._begin(cursor, writes=writes)
                yield cursor
                self._connection.commit()
            finally:
                cursor.close()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and (ours := self._translated(error)) is not None:
                raise ours from None  # the error of a driver may hold its connection string
            raise


def _following(prefix: str) -> str | None:
    """The first text after all texts that begin with `prefix`, by code points, as both databases compare; None if there
    is none."""
    last = prefix.rstrip("\U0010ffff")
    if not last:
        return None
    number = ord(last[-1]) + 1
    # Code points of surrogates are in no text.
    return last[:-1] + chr(0xE000 if 0xD800 <= number <= 0xDFFF else number)


def _in_order(values: Sequence[LastValue]) -> list[LastValue]:
    """Values in the order of the primary key: two writers then lock rows in the same order."""
    return sorted(values, key=lambda value: value[:2])


def counts_by_name(counts: Counts) -> Mapping[str, int]:
    return {name: getattr(counts, name) for name in _COUNTS}

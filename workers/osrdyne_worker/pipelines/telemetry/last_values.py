"""The last values of keys, for queries: read from the database of `osrdyne last-value` as an Arrow table.

Nothing is written. A file of SQLite is read on the host of the reader, by the same user: SQLite shares memory between
the programs that use a file. Source: docs/reference/telemetry/queries.md.
"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from osrdyne.errors import ConfigurationError, LastValueStoreError
from osrdyne.telemetry.last_values.store import LastValueStore
from osrdyne.telemetry.last_values.values import LastValue
from osrdyne_worker.pipelines.telemetry.events import EVENTS
from osrdyne_worker.pipelines.views.datasets import KeyRange

MAX_ROWS = 200_000
"""Last values of one view. They are in the memory of the worker and of the JVM."""

COLUMNS = pa.schema(
    [*(EVENTS.field(name) for name in EVENTS.names if name != "copy_of"), ("sent_ts", EVENTS.field("ts").type)]
)


class LastValues:
    """The last values of one pool. Thread-safe. Methods block, and raise `LastValueStoreError`."""

    def __init__(self, store: LastValueStore) -> None:
        self._store = store
        self._lock = threading.Lock()

    def positions(self) -> dict[int, int]:
        """The next offset that the reader reads, by partition. Values change only together with it."""
        with self._lock:
            return self._store.positions()

    def read(self, keys: KeyRange) -> pa.Table:
        """The values of all series of the keys."""
        with self._lock:
            found = self._store.find_keys(keys.text, is_prefix=keys.is_prefix, limit=MAX_ROWS + 1)
        if len(found) > MAX_ROWS:
            raise LastValueStoreError(
                f"More than {MAX_ROWS} series have keys that begin with {keys.text!r}: give the view fewer keys."
            )
        return to_table(found)


def to_table(values: list[LastValue]) -> pa.Table:
    """Values as rows with `COLUMNS`."""
    if not values:
        return COLUMNS.empty_table()
    columns = dict(zip(LastValue._fields, zip(*values, strict=True), strict=True))
    columns |= {name: columns[f"log_{name}"] for name in ("partition", "offset", "index")}
    columns["attributes"] = tuple(list(json.loads(one).items()) if one else [] for one in columns["attributes"])
    return pa.table([pa.array(columns[one.name], one.type) for one in COLUMNS], schema=COLUMNS)


@lru_cache(maxsize=256)
def last_values_in(store: str, path: str, pool: str) -> LastValues:
    """The last values of a pool in a database. `store`: `sqlite`, with the file as `path`, or `postgresql`, with a file
    that contains the URI. Connects later; all keys of this process share the connection. Raises
    `ConfigurationError`."""
    if store == "sqlite":
        from osrdyne.telemetry.last_values.sqlite import SqliteStore

        return LastValues(SqliteStore(Path(path), pool=pool))
    from osrdyne.telemetry.last_values.postgresql import PostgresqlStore  # psycopg is optional

    try:
        uri = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(
            f"Cannot read {path}, the file with the URI of PostgreSQL for last values: {reason}."
        ) from None
    return LastValues(PostgresqlStore(uri, pool=pool))

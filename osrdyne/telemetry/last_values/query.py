"""Last values for the event loop of the daemon: queries of the configured store, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from osrdyne.aio.tasks import Threads
from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError, LastValueStoreError, PoolConflictError
from osrdyne.telemetry.last_values.store import LastValueStore
from osrdyne.telemetry.last_values.values import Counts, LastValue

T = TypeVar("T")
QUERY_TIMEOUT = 15.0


@dataclass(frozen=True, slots=True)
class LastValuePage:
    """Last values of a key, by series. `following`: the series after which the next page begins; None on the last."""

    values: tuple[LastValue, ...]
    following: str | None


def open_store(settings: Settings, *, create: bool) -> LastValueStore:
    """The store that the settings name. It connects on first use. Raises `ConfigurationError`."""
    chosen, pool = settings.telemetry.last_values, settings.pool.id
    if chosen.store == "postgresql":
        from osrdyne.telemetry.last_values.postgresql import PostgresqlStore  # psycopg is optional

        assert chosen.uri is not None, "checked by the settings"
        return PostgresqlStore(chosen.uri.get_secret_value(), pool=pool, create=create)
    from osrdyne.telemetry.last_values.sqlite import SqliteStore, default_file

    try:
        file = default_file(pool) if chosen.file is None else Path(chosen.file)
    except RuntimeError:
        raise ConfigurationError(
            "telemetry.last_values.file: this user has no home directory; set the path of a file."
        ) from None
    return SqliteStore(file, pool=pool, create=create)


class LastValues:
    """Reads last values. Needs neither leadership nor RabbitMQ."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store: LastValueStore | None = None
        self._threads = Threads("last value queries", limit=1)

    async def page(self, key: str, *, series: str | None, after: str | None, limit: int) -> LastValuePage:
        """Raises `LastValueStoreError`, and `PoolConflictError` for a pool without a log."""
        found = await self._query(lambda: self._opened().find(key, series=series, after=after, limit=limit + 1))
        more = len(found) > limit
        return LastValuePage(tuple(found[:limit]), found[limit - 1].series if more else None)

    async def totals(self) -> Counts | None:
        """The outcomes of all events; None for a pool without a log. Raises `LastValueStoreError`."""
        return None if self._settings.telemetry.name is None else await self._query(lambda: self._opened().totals())

    async def close(self) -> None:
        """Close the connection to the store; the next query opens another."""
        if self._store is not None:
            with suppress(LastValueStoreError):
                await self._query(self._store.close)

    async def _query(self, query: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(QUERY_TIMEOUT):
                return await self._threads.run(query)
        except TimeoutError:
            raise LastValueStoreError(f"The store of last values did not answer within {QUERY_TIMEOUT:g} s.") from None

    def _opened(self) -> LastValueStore:
        """The store. Called in a thread, because importing a database driver takes a while."""
        if self._settings.telemetry.name is None:
            raise PoolConflictError("This pool has no log of telemetry, so it has no last values: set telemetry.name.")
        if self._store is None:
            self._store = open_store(self._settings, create=False)
        return self._store

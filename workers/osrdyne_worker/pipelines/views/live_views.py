"""Views of one key that show the data as it is when a query arrives: tables of telemetry, and last values.

Used by the SQL pipeline before each query. A view whose data has changed is opened again under its name; queries that
were analysed before keep the former rows.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any

from osrdyne_worker.pipelines.telemetry.listing import Listing
from osrdyne_worker.pipelines.views.datasets import LAST_VALUES, TELEMETRY, ResolvedTable
from osrdyne_worker.pipelines.views.loading import listing_of, open_last_values, open_view, positions_of


class LiveViews:
    """The views of one session. `renew` is called by one thread at a time, `open_last_values` by any."""

    def __init__(self, session: Any, tables: Iterable[ResolvedTable]) -> None:
        self._session = session
        tables = tuple(tables)
        self._tables = tuple(table for table in tables if table.spec.format == TELEMETRY)
        self._shown: dict[str, Listing] = {table.spec.view: listing_of(table) for table in self._tables}
        self._last_values = {table.spec.view: table for table in tables if table.spec.format == LAST_VALUES}
        self._positions: dict[str, dict[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def has_tables(self) -> bool:
        """Whether there are views of tables of telemetry."""
        return bool(self._tables)

    def renew(self) -> bool:
        """Open again the views of tables whose data has changed; return whether one has. Raises `DataProblemError`."""
        changed = False
        for table in self._tables:
            listing = listing_of(table)
            if listing is not self._shown[table.spec.view]:
                open_view(self._session, table)
                # Not before: after an error, the next query tries again.
                self._shown[table.spec.view] = listing
                changed = True
        return changed

    def has_last_values(self, names: Collection[str]) -> bool:
        """Whether one of the views is of last values."""
        return not self._last_values.keys().isdisjoint(names)

    def open_last_values(self, names: Collection[str]) -> None:
        """Open again those of the views of last values that have changed. Raises `DataProblemError`.

        For the views that a query names, and not in `renew`: other queries need no database.
        """
        for view in sorted(self._last_values.keys() & set(names)):
            table = self._last_values[view]
            with self._lock:
                # Before the values are read: a change in between is read now, and again by the next query.
                positions = positions_of(table)
                if positions != self._positions.get(view):
                    open_last_values(self._session, table)
                    self._positions[view] = positions

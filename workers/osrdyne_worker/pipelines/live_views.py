"""Views of one key that show the data as it is when a query arrives: tables of telemetry.

Used by the SQL pipeline before each query. A view whose data has changed is opened again under its name; queries that
were analysed before keep the former rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from osrdyne_worker.pipelines.datasets import TELEMETRY, ResolvedTable
from osrdyne_worker.pipelines.loading import listing_of, open_view
from osrdyne_worker.pipelines.telemetry.listing import Listing


class LiveViews:
    """The views of one session. Not thread-safe."""

    def __init__(self, session: Any, tables: Iterable[ResolvedTable]) -> None:
        self._session = session
        self._tables = tuple(table for table in tables if table.spec.format == TELEMETRY)
        self._shown: dict[str, Listing] = {table.spec.view: listing_of(table) for table in self._tables}

    def __bool__(self) -> bool:
        return bool(self._tables)

    def renew(self) -> bool:
        """Open the views again whose data has changed; whether there were some. Raises `DataProblemError`."""
        changed = False
        for table in self._tables:
            listing = listing_of(table)
            if listing is not self._shown[table.spec.view]:
                open_view(self._session, table)
                # Not before: after an error, the next query tries again.
                self._shown[table.spec.view] = listing
                changed = True
        return changed

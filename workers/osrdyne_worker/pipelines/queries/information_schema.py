"""The rows of `information_schema.tables`, `.columns` and `.schemata`: the views of one key.

The SQL pipeline makes temporary views of them when a query names them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from osrdyne_worker.pipelines.guard.names import CATALOG, NAMESPACE
from osrdyne_worker.pipelines.views.loading import View

_COLUMNS: dict[str, dict[str, pa.DataType]] = {
    "schemata": {"catalog_name": pa.string(), "schema_name": pa.string()},
    "tables": dict.fromkeys(("table_catalog", "table_schema", "table_name", "table_type"), pa.string()),
    "columns": {
        **dict.fromkeys(("table_catalog", "table_schema", "table_name", "column_name"), pa.string()),
        "ordinal_position": pa.int32(),
        **dict.fromkeys(("column_default", "is_nullable", "data_type"), pa.string()),
    },
}
INFORMATION_WIDTHS = {name: len(columns) for name, columns in _COLUMNS.items()}
"""The number of columns of each view."""


def information_schema(name: str, views: Sequence[View]) -> pa.Table:
    """The rows of one view of the information schema, by its name in lower case."""
    place = (CATALOG, NAMESPACE)
    rows: list[tuple[object, ...]]
    if name == "schemata":
        rows = [place]
    elif name == "tables":
        rows = [(*place, view.name, "VIEW") for view in views]
    else:
        rows = [
            (*place, view.name, column, position, None, "YES" if nullable else "NO", kind)
            for view in views
            for position, (column, kind, nullable) in enumerate(view.columns, 1)
        ]
    schema = pa.schema(list(_COLUMNS[name].items()))
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)

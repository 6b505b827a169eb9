"""Point look-ups in the views of a key: many requests, each with the values of the key columns, in one query.

The SQL pipeline calls `look_up` with a batch of requests. The values become rows of a small table that Spark joins with
the view, so a value is never a part of SQL. Spark compares values of the column's own type: a value that this type
cannot hold equals no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict
from pyspark.sql import Column, Window
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StructType

from osrdyne_worker import Answer, Call, RequestError
from osrdyne_worker.app.tables import Rows
from osrdyne_worker.pipelines.queries.key_values import UnequalError, arrow_type, read_key_value
from osrdyne_worker.pipelines.views.loading import View
from osrdyne_worker.spark.answers.results import prepare

MAX_BATCH = 256
_ROWS_AT_ONCE = 10_000
"""Rows of all answers of a batch up to which the rows of each key need not be counted in Spark, which costs a sort."""


class LookupRequest(BaseModel):
    """Body of `/lookup`. `key`: a value for each key column of the view `table`. `columns`: those of the answer."""

    model_config = ConfigDict(extra="forbid")

    table: str
    key: dict[str, Any]
    columns: list[str] | None = None


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A checked request. `key`: its values in the order of the view's key columns, or None if no row can have them.
    `columns`: the places of its columns in the view."""

    view: View
    key: tuple[Any, ...] | None
    columns: tuple[int, ...]


def look_up(
    session: Any, views: Sequence[View], calls: Sequence[Call], requests: Sequence[LookupRequest], *, row_limit: int
) -> list[Answer | RequestError]:
    """The answer to each request, with at most `row_limit` rows, or its error. Runs one query for each view.

    Raises Spark's error, which may be the fault of any of the requests.
    """
    by_name = {view.name: view for view in views}
    answers: list[Answer | RequestError | None] = []
    groups: dict[str, list[tuple[int, _Lookup]]] = {}
    for place, request in enumerate(requests):
        try:
            lookup = _checked(request, by_name)
        except RequestError as error:
            answers.append(error)
        else:
            answers.append(None)
            groups.setdefault(lookup.view.name, []).append((place, lookup))
    for group in groups.values():
        found = _query(session, [lookup for _, lookup in group], row_limit=row_limit)
        for (place, _), rows in zip(group, found, strict=True):
            try:
                answers[place] = rows.answer(Answer(), accept=calls[place].accept)
            except RequestError as error:
                answers[place] = error
    return [answer for answer in answers if answer is not None]


def _checked(request: LookupRequest, views: Mapping[str, View]) -> _Lookup:
    view = views.get(request.table.lower())
    if view is None:
        raise RequestError(
            f"There is no view {request.table[:60]!r}; this key has {', '.join(sorted(views)) or 'none'}.",
            400,
            "unknown_table",
        )
    if not view.key_columns:
        raise RequestError(
            f"The view {view.name} has no key columns; name them in worker.config.datasets (key_columns), or use /sql.",
            400,
            "no_key_columns",
        )
    given = {name.lower(): (name, value) for name, value in request.key.items()}
    if len(given) != len(request.key) or set(given) != {name.lower() for name in view.key_columns}:
        raise RequestError(
            f"key must have a value for each key column of {view.name}, and no others: {', '.join(view.key_columns)}.",
            400,
            "invalid_key_columns",
        )
    kinds = {name.lower(): kind for name, kind, _ in view.columns}
    key: list[Any] | None = []
    for column in view.key_columns:
        name, value = given[column.lower()]
        try:
            typed = read_key_value(f"key.{name}"[:100], kinds[column.lower()], value)
        except UnequalError:
            key = None  # the other values are still checked
        else:
            key = None if key is None else [*key, typed]
    return _Lookup(view, None if key is None else tuple(key), _places(request.columns, view))


def _places(names: list[str] | None, view: View) -> tuple[int, ...]:
    if names is None:
        return tuple(range(len(view.columns)))
    places = {name.lower(): place for place, (name, _, _) in enumerate(view.columns)}
    for name in names:
        if name.lower() not in places:
            raise RequestError(
                f"The view {view.name} has no column {name[:60]!r}; it has {', '.join(places)}."[:1000],
                400,
                "unknown_column",
            )
    if not names:
        raise RequestError("columns is empty; name one, or leave it out for all.", 400, "unknown_column")
    return tuple(places[name.lower()] for name in names)


def _query(session: Any, lookups: Sequence[_Lookup], *, row_limit: int) -> list[Rows]:
    """The rows of each look-up; all are in one view."""
    view = lookups[0].view
    # One row for each distinct key: a request that is sent twice does not double the rows of the join.
    places: dict[tuple[Any, ...], int] = {}
    for lookup in lookups:
        if lookup.key is not None:
            places.setdefault(lookup.key, len(places))
    columns = sorted({place for lookup in lookups for place in lookup.columns})
    query = prepare(_joined(session, view, list(places), columns))
    total = max(_ROWS_AT_ONCE, row_limit)
    rows = query.run(limit=total)
    if rows.truncated:
        # A key has very many rows: Spark keeps as many of each key as its answer may have, and one more.
        numbered = query.frame.withColumn("n", F.row_number().over(Window.partitionBy("place").orderBy("place")))
        limited = prepare(numbered.where(F.col("n") <= row_limit + 1).drop("n"))
        rows = limited.run(limit=len(places) * (row_limit + 1))
    table = rows.table.take(pc.sort_indices(rows.table, [("place", "ascending")]))
    starts, counts = _runs(table.column(0).to_pylist())
    order = {place: at + 1 for at, place in enumerate(columns)}  # the first column is `place`
    found = []
    for lookup in lookups:
        place = None if lookup.key is None else places[lookup.key]
        count = counts.get(place, 0)
        part = table.slice(starts.get(place, 0), min(count, row_limit)).select([order[at] for at in lookup.columns])
        names = [view.columns[at][0] for at in lookup.columns]
        types = tuple((name, rows.types[order[at]][1]) for name, at in zip(names, lookup.columns, strict=True))
        found.append(Rows(part.rename_columns(names), types, truncated=count > row_limit))
    return found


def _joined(session: Any, view: View, keys: list[tuple[Any, ...]], columns: Sequence[int]) -> Any:
    """The rows of the view that have one of the keys: `place`, the number of the key, and the columns as `c<place>`."""
    names = [name.lower() for name, _, _ in view.columns]
    kinds = {name.lower(): kind for name, kind, _ in view.columns}
    given = {"place": pa.array(range(len(keys)), pa.int32())}
    schema = StructType().add("place", IntegerType())
    source = session.table(view.name)
    # By place and not by name: a name of the view may equal one of ours, or hold a dot or a backtick.
    frame = source.toDF(*(f"c{place}" for place in range(len(names))))
    condition: Column | None = None
    for number, column in enumerate(view.key_columns):
        values = [key[number] for key in keys]
        at = names.index(column.lower())
        ours, theirs = F.col(f"k{number}"), F.col(f"c{at}")
        given[f"k{number}"] = pa.array(values, arrow_type(kinds[column.lower()]))
        # The very type of the column: from Arrow alone, Spark would make a timestamp of a timestamp without zone.
        schema = schema.add(f"k{number}", source.schema.fields[at].dataType)
        # Null equals null in a look-up. Only if there is one: Spark joins faster by plain equality.
        equal = theirs.eqNullSafe(ours) if None in values else theirs == ours
        condition = equal if condition is None else condition & equal
    small = session.createDataFrame(pa.table(given), schema)
    # Broadcast also if the settings turn automatic broadcasts off: a shuffle would move the whole view.
    return frame.join(F.broadcast(small), condition).select("place", *(f"c{place}" for place in columns))


def _runs(places: list[int]) -> tuple[dict[int | None, int], dict[int | None, int]]:
    """The first index and the number of each value in a sorted list."""
    starts: dict[int | None, int] = {}
    counts: dict[int | None, int] = {}
    for index, place in enumerate(places):
        starts.setdefault(place, index)
        counts[place] = counts.get(place, 0) + 1
    return starts, counts

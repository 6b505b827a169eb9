"""Open the data of one key as views of the session.

Called by the SQL pipeline at start, and by a later request if the data was missing. A failure that concerns the key (no
such path, unreadable files) becomes a `DataProblemError`; any other exception fails the start.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.logs import get_logger
from osrdyne_worker.pipelines.caching import cache_now, pool_of_thread, use_pool
from osrdyne_worker.pipelines.datasets import (
    InvalidKeyPartError,
    ResolvedDataset,
    ResolvedTable,
    SqlConfig,
    UnknownDatasetError,
    resolve,
)
from osrdyne_worker.pipelines.schemas import FORMATS, RememberedSchemas, schema_directory, signature
from osrdyne_worker.spark.errors import describe

log = get_logger(__name__)

PARALLEL_VIEWS = 4

_MISSING = re.compile(
    r"PATH_NOT_FOUND|PATH_DOES_NOT_EXIST|TABLE_OR_VIEW_NOT_FOUND|DELTA_TABLE_NOT_FOUND|FILE_NOT_EXIST"
)
_UNREADABLE = re.compile(
    r"UNABLE_TO_INFER_SCHEMA|FAILED_READ_FILE|CANNOT_READ_FILE|MALFORMED|CORRUPT|MISSING_TRANSACTION_LOG"
)


class DataProblemError(OsrdyneError):
    """The data of this key cannot be served: the answer to every request. `can_change`: a later attempt may succeed."""

    def __init__(self, message: str, *, code: int, error_code: str, can_change: bool = False) -> None:
        super().__init__(message, code=code, error_code=error_code)
        self.code = code
        self.error_code = error_code
        self.can_change = can_change


@dataclass(frozen=True, slots=True)
class View:
    """A view for queries. `columns` are (name, type, nullable); `to_cache`: the DataFrame that is still to be put into
    memory."""

    name: str
    format: str
    columns: tuple[tuple[str, str, bool], ...]
    cached: bool
    to_cache: Any = field(default=None, repr=False, compare=False)


def load(session: Any, config: SqlConfig, key: str) -> tuple[View, ...]:
    """Create the views of `key`, several at a time. Raises `DataProblemError` for a problem of this key."""
    try:
        dataset = resolve(config, key)
    except UnknownDatasetError as error:
        raise DataProblemError(error.message, code=404, error_code="unknown_dataset") from None
    except InvalidKeyPartError as error:
        raise DataProblemError(error.message, code=400, error_code="invalid_key") from None
    return _load_dataset(session, dataset)


def _load_dataset(session: Any, dataset: ResolvedDataset) -> tuple[View, ...]:
    pool = pool_of_thread(session)

    def open_table(table: ResolvedTable) -> View:
        # Each thread has its own properties: a new one runs its jobs in Spark's default pool.
        use_pool(session, pool)
        try:
            return _load_table(session, table)
        except OsrdyneError:
            raise
        except Exception as error:
            raise _translated(table, error) from error

    # Most of the time goes to the driver: it lists files and reads one of them for the schema.
    with ThreadPoolExecutor(min(PARALLEL_VIEWS, len(dataset.tables)), thread_name_prefix="views") as executor:
        return tuple(executor.map(open_table, dataset.tables))


def _load_table(session: Any, table: ResolvedTable) -> View:
    spec = table.spec
    # Before anything is read: a link must not lead one key to the files of another.
    _check_directory(table)
    frame = _filtered(_read(session, table), table, session)
    frame.createOrReplaceTempView(spec.view)
    # A filter hides rows of other tenants. An error of Spark may quote a value of a row that the filter leaves out,
    # unless the filter is applied before any query: then the view is in memory before the first request.
    if spec.cache and table.filters:
        cache_now(session, spec.view, frame)
    log.info("view opened", view=spec.view, format=spec.format, cached=spec.cache)
    columns = tuple((field.name, field.dataType.simpleString(), field.nullable) for field in frame.schema.fields)
    return View(
        name=spec.view,
        format=spec.format,
        columns=columns,
        cached=spec.cache,
        to_cache=frame if spec.cache and not table.filters else None,
    )


def _read(session: Any, table: ResolvedTable) -> Any:
    spec = table.spec
    reader = session.read.options(**spec.options)
    if spec.format == "table":
        return reader.table(table.path)
    if spec.columns is not None:
        return reader.schema(spec.columns).format(spec.format).load(table.path)
    files = signature(table.path) if spec.format in FORMATS else None
    if files is None:
        return reader.format(spec.format).load(table.path)
    schemas = RememberedSchemas(schema_directory(), spark_version=session.version)
    known = schemas.get(table.path, spec.format, spec.options)
    if known is not None:
        return reader.schema(StructType.fromJson(known)).format(spec.format).load(table.path)
    frame = reader.format(spec.format).load(table.path)
    schemas.put(table.path, spec.format, spec.options, frame.schema.jsonValue(), files=files)
    return frame


def _filtered(frame: Any, table: ResolvedTable, session: Any) -> Any:
    """The rows whose columns equal the parts of the key. Values become literals of the column's type, never SQL."""
    types = {field.name.lower(): field.dataType for field in frame.schema.fields}
    for column, value in table.filters:
        if column.lower() not in types:
            raise ConfigurationError(
                f"The view {table.spec.view} has a filter on {column!r}, which is not one of its columns: "
                f"{', '.join(types)}."
            )
        # Cast to the type of the column, never the other way: a cast of the column could match other values.
        literal = F.lit(value).try_cast(types[column.lower()])
        # A value that is not of this type would be null, and the filter would hide every row without an error.
        if session.range(1).select(literal.isNull()).first()[0]:
            kind = types[column.lower()].simpleString()
            raise InvalidValueError(f"The key contains {column}={value!r}, which is not a valid {kind}.")
        # The key is data: as a literal it cannot become SQL, whatever characters it has.
        frame = frame.where(F.col(f"`{column.replace('`', '``')}`") == literal)
    return frame


class InvalidValueError(DataProblemError):
    """A part of the key is not a valid value of its column."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=400, error_code="invalid_key")


def _check_directory(table: ResolvedTable) -> None:
    """Check that no symbolic link leads a local path out of its directory."""
    if table.directory is None:
        return
    local = table.path.removeprefix("file://").removeprefix("file:")
    root = os.path.realpath(table.directory)
    if os.path.commonpath([root, os.path.realpath(local)]) != root:
        raise DataProblemError(
            f"The data of the view {table.spec.view} lies outside of its directory.", code=403, error_code="invalid_key"
        )


def _translated(table: ResolvedTable, error: Exception) -> Exception:
    """The exception to raise for `error`: a problem of this key, of the configuration, or `error` itself."""
    failure = describe(error)
    if failure is None:
        return error
    view, path = table.spec.view, table.path
    if _MISSING.search(failure.condition):
        return DataProblemError(
            f"There is no data for the view {view}: {path} does not exist.",
            code=404,
            error_code="dataset_not_found",
            can_change=True,
        )
    if _UNREADABLE.search(failure.condition) or _UNREADABLE.search(failure.message):
        return DataProblemError(
            f"The data of the view {view} at {path} cannot be read: {failure.message}",
            code=500,
            error_code="dataset_unreadable",
            can_change=True,
        )
    if failure.is_query:
        # Not a problem of the data: the start of the worker fails with it.
        return ConfigurationError(f"The configuration of the view {view} is invalid: {failure.message}")
    return error

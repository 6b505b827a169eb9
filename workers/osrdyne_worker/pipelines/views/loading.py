"""Open the data of one key as views of the session.

Called by the SQL pipeline at start, and by a later request if the data was missing. A failure that concerns the key (no
such path, unreadable files) becomes a `DataProblemError`; any other exception fails the start. Views whose schema is
known without Spark are deferred: `DeferredViews` opens them when a query first names them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pyspark.errors import ParseException
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from osrdyne.errors import ConfigurationError, LastValueStoreError, OsrdyneError
from osrdyne.logs import get_logger
from osrdyne_worker.app.errors import DataChangedError, RequestError
from osrdyne_worker.pipelines.queries.key_values import KEY_TYPES, is_key_type
from osrdyne_worker.pipelines.telemetry.last_values import COLUMNS, LastValues, last_values_in
from osrdyne_worker.pipelines.telemetry.listing import EVENT_COLUMNS, Listing, committed_files
from osrdyne_worker.pipelines.telemetry.table import StorageError, TableDamagedError
from osrdyne_worker.pipelines.views.caching import cache_now, drop_cached
from osrdyne_worker.pipelines.views.data_versions import TRANSACTIONAL, DataFiles, TableFiles, data_files
from osrdyne_worker.pipelines.views.datasets import (
    LAST_VALUES,
    LIVE,
    TELEMETRY,
    InvalidKeyPartError,
    KeyRange,
    ResolvedDataset,
    ResolvedTable,
    SqlConfig,
    TableSpec,
    UnknownDatasetError,
    has_header,
    resolve,
)
from osrdyne_worker.pipelines.views.remedies import remedy
from osrdyne_worker.pipelines.views.schemas import FORMATS, RememberedSchemas, local_path, remembered_schemas, signature
from osrdyne_worker.spark.failures.errors import CALL_FROM, SPARK_GONE, SparkFailure, describe
from osrdyne_worker.spark.files.committed_files import committed_frame
from osrdyne_worker.spark.files.parquet_schema import parquet_schema, readable_columns
from osrdyne_worker.spark.jobs import job_properties, set_job_properties

log = get_logger("sql")

PARALLEL_VIEWS = 4
UNREADABLE = "dataset_unreadable"
"""The code of data that exists and that Spark cannot read."""
_CORRUPT_RECORD = "_corrupt_record"
"""The column in which Spark puts lines that it cannot parse; a schema with no other column has no data."""
_OF_CONFIGURATION = frozenset(
    {"DATA_SOURCE_NOT_FOUND", "UNSUPPORTED_DATATYPE", "UNSUPPORTED_DATA_SOURCE_FOR_DIRECT_QUERY"}
)
"""Errors that do not depend on the data."""
_DECLARABLE = (BooleanType, DateType, NumericType, StringType, TimestampNTZType, TimestampType)
"""Types that every format can read. For tables with other types in `columns`, Spark decides at the start."""

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

    def refusal(self) -> RequestError:
        """The error for the caller."""
        return RequestError(self.message, self.code, self.error_code)


@dataclass(frozen=True, slots=True)
class Deferred:
    """What is needed to open a view later. `schema`: None if the configuration has the columns."""

    table: ResolvedTable
    schema: StructType | None
    conditions: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A view for queries. `columns` are (name, type, nullable); `to_cache`: the DataFrame that is still to be put into
    memory; `deferred`: the view is not open yet."""

    name: str
    format: str
    columns: tuple[tuple[str, str, bool], ...]
    cached: bool
    key_columns: tuple[str, ...] = ()
    to_cache: Any = field(default=None, repr=False, compare=False)
    deferred: Deferred | None = field(default=None, repr=False, compare=False)
    dropped: tuple[tuple[str, str], ...] = ()
    """The columns that Spark cannot read and that the view does not have, each with the reason."""
    problem: DataProblemError | None = field(default=None, repr=False, compare=False)
    """Why the view cannot be opened, although others of the key can. A query that names it is answered so."""


def dataset_of(config: SqlConfig, key: str, session: Any) -> ResolvedDataset:
    """The dataset of `key`. Raises `DataProblemError` for a problem of this key."""
    try:
        return _on_default_file_system(resolve(config, key), session)
    except UnknownDatasetError as error:
        raise DataProblemError(error.message, code=404, error_code="unknown_dataset") from None
    except InvalidKeyPartError as error:
        raise DataProblemError(error.message, code=400, error_code="invalid_key") from None


def _on_default_file_system(dataset: ResolvedDataset, session: Any) -> ResolvedDataset:
    """Put the URL of Hadoop's default file system before paths without one, unless it is the local one. Otherwise the
    modules that list and read local files without Spark would treat these paths as local."""
    if not hasattr(session, "_jsparkSession"):  # Spark Connect: the configuration is that of the server
        return dataset
    address = str(session.sparkContext._jsc.hadoopConfiguration().get("fs.defaultFS") or "file:").rstrip("/")
    if address.lower().startswith("file:"):
        return dataset
    tables = (
        replace(table, path=f"{address}{table.path}", directory=None)
        if table.spec.format not in {"table"} | LIVE and table.path.startswith("/")
        else table
        for table in dataset.tables
    )
    return replace(dataset, tables=tuple(tables))


def load(
    session: Any,
    dataset: ResolvedDataset,
    *,
    mark: str = "",
    shared: bool = True,
    files: DataFiles | None = None,
    schemas: RememberedSchemas | None = None,
) -> tuple[View, ...]:
    """Create the views of a key, several at a time. Raises `DataProblemError` for a problem of this key.

    `mark`: see `cache_now`; `shared`: another load may have the same mark. `files`: those of the tables, listed just
    before; views whose schema is known without Spark are then deferred. `schemas`: of earlier loads.
    """
    if files is None:
        # A reload: the former views stay if one of the new ones cannot be read.
        return _open_all(session, dataset.tables, mark=mark, shared=shared)
    deferred: dict[str, View] = {}
    for table in dataset.tables:
        try:
            view = _deferred(session, table, files, schemas)
        except DataProblemError as error:
            view = _unreadable(table, error)
        if view is not None:
            deferred[view.name] = view
    to_open = [table for table in dataset.tables if table.spec.view not in deferred]
    opened = _open_all(session, to_open, mark=mark, shared=shared, keeps_others=True) if to_open else ()
    by_name = {**deferred, **{view.name: view for view in opened}}
    views = tuple(by_name[table.spec.view] for table in dataset.tables)
    problems = [view.problem for view in views if view.problem is not None]
    if problems and len(problems) == len(views):
        raise problems[0]
    for one in problems:
        log.warning("view cannot be read", reason=one.message)
    return views


def _unreadable(table: ResolvedTable, problem: DataProblemError) -> View:
    """The view of a table that cannot be read; other views of the key are used without it. Raises any other problem."""
    if problem.error_code != UNREADABLE:
        raise problem
    view = table.spec.view
    return View(view, table.spec.format, (), cached=False, deferred=Deferred(table, None, ()), problem=problem)


def _open_all(
    session: Any, tables: Sequence[ResolvedTable], *, mark: str, shared: bool, keeps_others: bool = False
) -> tuple[View, ...]:
    """Open the views. `keeps_others`: one that cannot be read costs no other one."""
    properties = job_properties(session)
    cached: list[str] = []

    def open_table(table: ResolvedTable) -> View:
        set_job_properties(session, properties)
        try:
            return open_view(session, table, mark=mark, on_cache=cached.append)
        except OsrdyneError as error:
            problem: Exception = error
        except Exception as error:
            problem = _translated(session, table, error)
        if keeps_others and isinstance(problem, DataProblemError):
            return _unreadable(table, problem)
        raise problem

    # In parallel: the driver spends most of the time on listing files, and reading one of them for the schema.
    try:
        with ThreadPoolExecutor(min(PARALLEL_VIEWS, len(tables)), thread_name_prefix="views") as executor:
            return tuple(executor.map(open_table, tables))
    except BaseException:
        # All threads have ended. Each reload has a mark of its own, so no later one would use this data.
        if not shared:
            with suppress(Exception):  # the JVM may have ended
                drop_cached(session, cached)
        raise


def open_view(
    session: Any, table: ResolvedTable, *, mark: str = "", on_cache: Callable[[str], None] = lambda view: None
) -> View:
    """Create the view of one table. Raises errors of Spark, and `DataProblemError` or `ConfigurationError`. `on_cache`
    is called before its data is put into memory here."""
    spec = table.spec
    frame = _frame_of(session, table)
    frame.createOrReplaceTempView(spec.view)
    # A filter hides rows of other tenants. An error of Spark may quote a value of a row that the filter leaves out,
    # unless the filter is applied before any query: then the view is in memory before the first request.
    if spec.cache and table.filters:
        cache_now(session, spec.view, frame, mark, on_begin=on_cache)
    columns = _columns(frame.schema)
    return View(
        name=spec.view,
        format=spec.format,
        columns=columns,
        cached=spec.cache,
        key_columns=_key_columns(spec, columns),
        to_cache=frame if spec.cache and not table.filters else None,
        dropped=_dropped(session, table),
    )


def _frame_of(session: Any, table: ResolvedTable) -> Any:
    """The rows of a view. Raises as `open_view` does."""
    _check_directory(table)
    frame = _read(session, table)
    if table.spec.format == "json" and frame.columns == [_CORRUPT_RECORD]:
        reason = "no line of the files is a record"
        raise _unreadable_data(table, f"{reason}{remedy(_CORRUPT_RECORD, '')}.")
    return _filtered(frame, table, session)


def _dropped(session: Any, table: ResolvedTable) -> tuple[tuple[str, str], ...]:
    drops = table.spec.unreadable_columns == "drop"
    readable = readable_columns(session, table.path) if drops else None
    return () if readable is None else tuple(readable.dropped.items())


def _columns(schema: StructType) -> tuple[tuple[str, str, bool], ...]:
    return tuple((field.name, field.dataType.simpleString(), field.nullable) for field in schema.fields)


class DeferredViews:
    """The views of one load that Spark opens when a query first names them. Thread-safe.

    To open a view costs Spark as much as to run a small query, and most queries name few of the views of their key.
    """

    def __init__(self, session: Any, views: Iterable[View], files: DataFiles) -> None:
        self._session = session
        self._files = files
        self._lock = threading.Lock()
        self._views = {view.name: view for view in views if view.deferred is not None}
        """Never changed, but replaced: it is read without the lock."""

    @property
    def names(self) -> frozenset[str]:
        """The views that are not open yet."""
        return frozenset(self._views)

    def open(self, names: Collection[str]) -> None:
        """Open those of the views that are not open yet.

        Raises `DataChangedError` if their files are not those of the load any more: a query must not see views of
        different times. Raises `RequestError` for other problems of the data, and errors of Spark.
        """
        if self._views.keys().isdisjoint(names):
            return
        with self._lock:
            for name in sorted(self._views.keys() & set(names)):
                self._open(self._views[name])
                self._views = {other: view for other, view in self._views.items() if other != name}

    def _open(self, view: View) -> None:
        assert view.deferred is not None
        table, failure = view.deferred.table, None
        try:
            if view.problem is not None:
                # All is loaded again if its data can be read by now.
                _frame_of(self._session, table)
                changed = True
            else:
                _check_directory(table)
                frame = _read(self._session, table, schema=view.deferred.schema)
                for condition in view.deferred.conditions:
                    frame = frame.where(condition)
                frame.createOrReplaceTempView(view.name)
                # A schema that Spark understands in another way is loaded again, by Spark alone.
                changed = _columns(frame.schema) != view.columns
        except Exception as error:
            changed, failure = False, error
        # Afterwards: Spark has listed the files by now.
        if changed or self._has_changed(table):
            raise DataChangedError(f"The files of the view {view.name} have changed since the data was loaded.")
        if failure is None:
            return
        problem = failure if isinstance(failure, OsrdyneError) else _translated(self._session, table, failure)
        if isinstance(problem, DataProblemError):
            raise problem.refusal() from failure
        raise problem from failure

    def _has_changed(self, table: ResolvedTable) -> bool:
        name = table.spec.view
        before, now = self._files.tables.get(name), data_files([table]).tables.get(name)
        return before is not None and (now is None or now.signature != before.signature)


def _deferred(
    session: Any, table: ResolvedTable, files: DataFiles | None, schemas: RememberedSchemas | None
) -> View | None:
    """The view, to be opened later, if it has files and its schema is known without Spark; otherwise None. Raises as
    `open_view` does."""
    spec = table.spec
    listed = None if files is None else files.tables.get(spec.view)
    # The text of directories and CSV files is compared with the key, which needs what Spark lists (`_filtered`).
    if table.filters and listed is not None and (listed.has_directories or spec.format == "csv"):
        return None
    # Data that is to be in memory is read in any case.
    if listed is None or not listed.count or spec.cache or spec.format in TRANSACTIONAL:
        return None
    # Spark Connect opens files on its server.
    if local_path(table.path) is None or not hasattr(session, "_jsparkSession"):
        return None
    _check_directory(table)
    try:
        schema = _known_schema(session, table, listed, schemas)
        if schema is None or len({name.lower() for name in schema.names}) != len(schema.names):
            return None
        # As Spark reads files: any value may be missing.
        columns = tuple((name, kind, True) for name, kind, _ in _columns(schema))
        return View(
            name=spec.view,
            format=spec.format,
            columns=columns,
            cached=False,
            key_columns=_key_columns(spec, columns),
            deferred=Deferred(table, None if spec.columns else schema, _conditions(session, table, schema)),
            dropped=_dropped(session, table),
        )
    except OsrdyneError:
        raise
    except Exception as error:
        raise _translated(session, table, error) from error


def _known_schema(
    session: Any, table: ResolvedTable, listed: TableFiles, schemas: RememberedSchemas | None
) -> StructType | None:
    """The schema that the table will have; None if only Spark can infer it."""
    spec = table.spec
    if spec.columns is not None:
        # The names of directories may add columns.
        return None if listed.has_directories else _declared_schema(spec.columns)
    if spec.unreadable_columns == "drop":
        # Not remembered: it is read from one footer.
        readable = None if listed.has_directories else readable_columns(session, table.path)
        return None if readable is None else readable.schema
    known = None if schemas is None else schemas.get(table.path, spec.format, spec.options)
    if known is not None:
        return StructType.fromJson(known)
    if spec.format != "parquet" or spec.options:
        return None
    files = None if schemas is None else signature(table.path)
    schema = parquet_schema(session, table.path)
    if schemas is not None and files is not None and schema is not None:
        schemas.put(table.path, spec.format, spec.options, schema.jsonValue(), files=files)
    return schema


@lru_cache(maxsize=1000)
def _declared_schema(columns: str) -> StructType | None:
    """The schema of `columns`; None if it is invalid, or if not every format can read its types."""
    try:
        schema = DataType.fromDDL(columns)
    except Exception:  # Spark reports the error when the view is opened
        return None
    fields = schema.fields if isinstance(schema, StructType) else []
    plain = fields and all(isinstance(field.dataType, _DECLARABLE) for field in fields)
    return schema if plain and isinstance(schema, StructType) else None


def _key_columns(spec: TableSpec, columns: tuple[tuple[str, str, bool], ...]) -> tuple[str, ...]:
    """The key columns as the data spells them. Raises `ConfigurationError` for one that cannot be a key."""
    known = {name.lower(): (name, kind) for name, kind, _ in columns}
    for column in spec.key_columns:
        if column.lower() not in known:
            raise ConfigurationError(
                f"The view {spec.view} has the key column {column!r}, which is not one of its columns: "
                f"{', '.join(known)}."
            )
        name, kind = known[column.lower()]
        if not is_key_type(kind):
            raise ConfigurationError(
                f"The view {spec.view} has the key column {name!r} of the type {kind}, whose values cannot be compared "
                f"exactly; key columns are {KEY_TYPES}."
            )
    return tuple(known[column.lower()][0] for column in spec.key_columns)


def _read(session: Any, table: ResolvedTable, *, schema: StructType | None = None) -> Any:
    """The table as a DataFrame. `schema`: if it is known."""
    spec = table.spec
    reader = session.read.options(**_reader_options(spec))
    if spec.format == TELEMETRY:
        return _committed_rows(session, table)
    if spec.format == LAST_VALUES:
        # `LiveViews` reads them when a query names the view: other queries must not wait for the database.
        return session.createDataFrame(COLUMNS.empty_table())
    if schema is not None:
        return reader.schema(schema).format(spec.format).load(table.path)
    if spec.format == "table":
        # Spark remembers the files of a catalog table; they may have changed since.
        session.catalog.refreshTable(table.path)
        return reader.table(table.path)
    if spec.columns is not None:
        return reader.schema(spec.columns).format(spec.format).load(table.path)
    if spec.unreadable_columns == "drop" and (readable := readable_columns(session, table.path)) is not None:
        return reader.schema(readable.schema).format(spec.format).load(table.path)
    if spec.format == "parquet" and not spec.options:
        # No Spark job, which takes most of the time to open a small table.
        schema = parquet_schema(session, table.path)
        if schema is not None:
            return reader.schema(schema).format("parquet").load(table.path)
    files = signature(table.path) if spec.format in FORMATS else None
    if files is None:
        return reader.format(spec.format).load(table.path)
    schemas = remembered_schemas(session)
    known = schemas.get(table.path, spec.format, spec.options)
    if known is not None:
        return reader.schema(StructType.fromJson(known)).format(spec.format).load(table.path)
    frame = reader.format(spec.format).load(table.path)
    schemas.put(table.path, spec.format, spec.options, frame.schema.jsonValue(), files=files)
    return frame


def _reader_options(spec: TableSpec) -> dict[str, str | bool | int]:
    """The options of the reader.

    By default, Spark reads the columns of CSV files by position although they have a header: a file with another order
    would give a tenant the rows of another. With this option, a header with other names is an error.
    """
    if spec.format != "csv" or not has_header(spec.options):
        return spec.options
    return {"enforceSchema": False, **spec.options}


def listing_of(table: ResolvedTable) -> Listing:
    """The committed files of a table of telemetry. Raises `DataProblemError`."""
    _check_directory(table)
    try:
        return committed_files(Path(table.path)).current()
    except (StorageError, TableDamagedError) as error:
        code, error_code = (503, "dataset_unreachable") if error.retryable else (500, UNREADABLE)
        raise DataProblemError(error.message, code=code, error_code=error_code, can_change=True) from None


def _committed_rows(session: Any, table: ResolvedTable) -> Any:
    """The rows of a table of telemetry that have the keys of the dataset. A table without commits has no rows."""
    assert table.keys is not None
    frame = committed_frame(session, table.path, listing_of(table).files, columns=EVENT_COLUMNS)
    return frame.where(_has_key(table.keys))


def positions_of(table: ResolvedTable) -> dict[int, int]:
    """The positions of the last-value reader, which change in each transaction that changes values. Raises
    `DataProblemError`."""
    with _last_value_problems():
        return _last_values(table).positions()


def open_last_values(session: Any, table: ResolvedTable) -> None:
    """Create the view with the last values as they are now. Raises `DataProblemError`."""
    assert table.keys is not None
    with _last_value_problems():
        values = _last_values(table).read(table.keys)
    # They are few: a DataFrame of them is data in memory, and needs no Spark job.
    _filtered(session.createDataFrame(values), table, session).createOrReplaceTempView(table.spec.view)


def _last_values(table: ResolvedTable) -> LastValues:
    assert table.spec.pool is not None
    _check_directory(table)
    return last_values_in(table.spec.store, table.path, table.spec.pool)


@contextmanager
def _last_value_problems() -> Iterator[None]:
    """Raise `DataProblemError` for a database of last values that cannot be used."""
    try:
        yield
    except LastValueStoreError as error:
        raise DataProblemError(error.message, code=503, error_code="dataset_unreachable", can_change=True) from None
    except ConfigurationError as error:
        raise DataProblemError(error.message, code=500, error_code=UNREADABLE, can_change=True) from None


def _has_key(keys: KeyRange) -> Any:
    # As a literal: no character of a key has a meaning, as `%` and `_` would have in LIKE.
    return F.col("key").startswith(F.lit(keys.text)) if keys.is_prefix else F.col("key") == F.lit(keys.text)


def _filtered(frame: Any, table: ResolvedTable, session: Any) -> Any:
    """The rows whose columns equal the parts of the key."""
    if not table.filters:
        return frame
    schema = frame.schema
    # Spark takes the values of directories for numbers or dates where it can, and those of CSV files if it is asked to:
    # `tenant=07` would be the tenant 7 too.
    filtered = {column.lower() for column, _ in table.filters}
    texts = filtered & (_partition_columns(frame) | (_numbers(schema) if table.spec.format == "csv" else set()))
    if texts:
        kinds = [StringType() if field.name.lower() in texts else field.dataType for field in schema]
        as_text = [StructField(field.name, kind) for field, kind in zip(schema, kinds, strict=True)]
        frame = _read(session, table, schema=StructType(as_text))
    for condition in _conditions(session, table, frame.schema):
        frame = frame.where(condition)
    if not texts:
        return frame
    # After the filter, which has compared the text, the columns have the types that they would have without it.
    return frame.select([F.col(_quoted(field.name)).cast(field.dataType).alias(field.name) for field in schema])


def _partition_columns(frame: Any) -> set[str]:
    """The columns whose values are in the names of directories, in lower case."""
    if not hasattr(frame, "_jdf"):
        return set()  # Spark Connect: the plan is on the server
    found: set[str] = set()
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves().iterator()
    while leaves.hasNext():
        leaf = leaves.next()
        if leaf.getClass().getSimpleName() != "LogicalRelation":
            continue
        relation = leaf.relation()
        # The index of a catalog, or of Delta Lake, has the values with their types.
        if hasattr(relation, "location") and relation.location().getClass().getSimpleName() == "InMemoryFileIndex":
            found |= {name.lower() for name in relation.partitionSchema().fieldNames()}
    return found


def _numbers(schema: StructType) -> set[str]:
    """The columns that are numbers, in lower case."""
    return {field.name.lower() for field in schema if isinstance(field.dataType, NumericType)}


def _quoted(column: str) -> str:
    return f"`{column.replace('`', '``')}`"


def _conditions(session: Any, table: ResolvedTable, schema: StructType) -> tuple[Any, ...]:
    """The filters of the table. Values become literals of the column's type, never SQL."""
    types = {field.name.lower(): field.dataType for field in schema.fields}
    conditions = []
    for column, value in table.filters:
        if column.lower() not in types:
            raise ConfigurationError(
                f"The view {table.spec.view} has a filter on {column!r}, which is not one of its columns: "
                f"{', '.join(types)}."
            )
        # Cast to the type of the column, never the other way: a cast of the column could match other values.
        literal = F.lit(value).try_cast(types[column.lower()])
        if not isinstance(types[column.lower()], StringType):
            _require_canonical(session, literal, column, value, types[column.lower()].simpleString())
        # The key is data: as a literal it cannot become SQL, whatever characters it has.
        conditions.append(F.col(_quoted(column)) == literal)
    return tuple(conditions)


def _require_canonical(session: Any, literal: Any, column: str, value: str, kind: str) -> None:
    """Require that the text of the key is the one text of its value. Otherwise the keys `7` and `07` would see the same
    rows, although they are two keys. Raises `InvalidValueError`."""
    # Spark evaluates it while it plans the query: without a job, which would take most of the time to open a view.
    text = session.sql("values 1").select(literal.cast("string")).first()[0]
    # A value that is not of this type would be null, and the filter would hide every row without an error.
    if text is None:
        raise InvalidValueError(f"The key contains {column}={value!r}, which is not a valid {kind}.")
    if text != value:
        raise InvalidValueError(f"The key contains {column}={value!r}; as a {kind}, this value is written {text!r}.")


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


def is_lost_file(failure: SparkFailure) -> bool:
    """Whether Spark has failed to find or read a file."""
    return any(pattern.search(failure.condition) for pattern in (_MISSING, _UNREADABLE))


def _translated(session: Any, table: ResolvedTable, error: Exception) -> Exception:
    """The exception to raise for `error`: a problem of this key, of the configuration, or `error` itself."""
    failure = describe(error)
    if failure is None:
        return error
    view, path = table.spec.view, table.path
    if failure.store is not None:
        code, error_code = (404, "dataset_not_found") if failure.store.is_missing else (503, "dataset_unreachable")
        return DataProblemError(
            f"The data of the view {view} at {path} cannot be read: {failure.message}",
            code=code,
            error_code=error_code,
            can_change=True,
        )
    if _MISSING.search(failure.condition):
        return DataProblemError(
            f"There is no data for the view {view}: {path} does not exist.",
            code=404,
            error_code="dataset_not_found",
            can_change=True,
        )
    if CALL_FROM in failure.message:
        return DataProblemError(
            f"The data of the view {view} at {path} cannot be reached: {failure.message}",
            code=503,
            error_code="dataset_unreachable",
            can_change=True,
        )
    if isinstance(error, ParseException) or failure.condition in _OF_CONFIGURATION:
        # Not a problem of the data: the start of the worker fails.
        return ConfigurationError(f"The configuration of the view {view} is invalid: {failure.message}")
    if failure.exhausted or failure.condition == SPARK_GONE:
        return error
    named = ""
    if table.spec.format == "parquet" and table.spec.unreadable_columns == "refuse":
        readable = readable_columns(session, table.path)
        if readable is not None and readable.dropped:
            named = f" (columns: {', '.join(readable.dropped)}; unreadable_columns: drop leaves them out)"
    reason = f"{failure.message.rstrip('.')}{named}{remedy(failure.condition, failure.message)}."
    return _unreadable_data(table, reason)


def _unreadable_data(table: ResolvedTable, reason: str) -> DataProblemError:
    message = f"The data of the view {table.spec.view} at {table.path} cannot be read: {reason}"
    return DataProblemError(message, code=500, error_code=UNREADABLE, can_change=True)

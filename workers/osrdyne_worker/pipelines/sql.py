"""The SQL pipeline: answers queries over the data of its key. Its application: `osrdyne_worker.pipelines.sql:app`.

This module has the handlers. `guard` decides which queries may run, `views` opens the data, and `queries` has the forms
of a query besides its text. Spark evaluates no query that the guard has not accepted. See
docs/reference/sql-pipeline/restrictions.md.
"""

from __future__ import annotations

# First: the worker's JVM starts with it, beside the imports below.
from osrdyne_worker.pipelines.guard.sessions import sessions  # isort: split

import platform
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from osrdyne.logs import get_logger
from osrdyne.protocol.data_versions import DATA_VERSION_HEADER, required_data_version
from osrdyne.protocol.messages import wants_arrow
from osrdyne_worker import Answer, App, Call, Context, DataChangedError, RequestError
from osrdyne_worker.app.errors import answer_too_large
from osrdyne_worker.app.tables import Rows, first_rows
from osrdyne_worker.pipelines.guard.check import CheckedQuery, checked_query
from osrdyne_worker.pipelines.guard.limits import PlanLimits, check_limits, check_text
from osrdyne_worker.pipelines.guard.names import INFORMATION_VIEWS
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import TextLimits
from osrdyne_worker.pipelines.queries.export import ExportRequest, Exports
from osrdyne_worker.pipelines.queries.information_schema import INFORMATION_WIDTHS, information_schema
from osrdyne_worker.pipelines.queries.lookup import MAX_BATCH, LookupRequest, look_up
from osrdyne_worker.pipelines.queries.paging import Page, StoredResults
from osrdyne_worker.pipelines.queries.parameters import cache_key, length_of, read_parameters
from osrdyne_worker.pipelines.queries.statements import table_of
from osrdyne_worker.pipelines.views.caching import BackgroundCaching, drop_cached
from osrdyne_worker.pipelines.views.data_versions import TRANSACTIONAL, DataFiles, data_files
from osrdyne_worker.pipelines.views.datasets import ResolvedDataset, SqlConfig, parse_config
from osrdyne_worker.pipelines.views.live_views import LiveViews
from osrdyne_worker.pipelines.views.loading import (
    UNREADABLE,
    DataProblemError,
    DeferredViews,
    View,
    dataset_of,
    is_lost_file,
    load,
)
from osrdyne_worker.pipelines.views.schemas import remembered_schemas
from osrdyne_worker.spark.answers.least_size import least_bytes
from osrdyne_worker.spark.answers.results import PreparedQuery, prepare
from osrdyne_worker.spark.answers.streams import StreamedFrame, is_streamable
from osrdyne_worker.spark.cached_data import stored_data
from osrdyne_worker.spark.failures.errors import SparkFailure, describe
from osrdyne_worker.spark.files.file_listing import list_files
from osrdyne_worker.spark.parameters import Parameters
from osrdyne_worker.spark.plans import ParsedQuery, explained_plan, is_repeatable, load_plan_walker, memory_bytes

log = get_logger(__name__)

ValueT = TypeVar("ValueT")

_REMEMBERED_QUERIES = 200
_REMEMBERED_LENGTH = 10_000
_LARGEST_SHARED = 64 * 1024
"""Bytes of a request that may share a run: the text is searched on the event loop."""
_RUNS_BY_ITSELF = re.compile(
    # Random values, and times that are evaluated when the query runs. A query that is refused may match as well.
    rb"\b(?:rand|uuid|shuffle|uniform|tablesample|now\b|today|tomorrow|yesterday|current_|curdate|localtime"
    # A page has a cursor of its own. An escape may hide any of these words.
    rb"|unix_timestamp)|\"(?:page_size|cursor)\"|\\u",
    re.IGNORECASE,
)
LARGEST_SHARE = 4
"""A value larger than `max_bytes` divided by this is not cached: it would evict too many others."""


app = App(sessions=sessions, check_config=parse_config, poolable=True)


class SqlRequest(BaseModel):
    """Body of `/sql`. `limit`: the maximum number of rows in the answer. `parameters`: the values of the query's
    parameters, by name (`:name`) or by position (`?`).

    `page_size`: the answer has the first rows only, and a cursor for the next ones. A request with a `cursor` has no
    query.
    """

    model_config = ConfigDict(extra="forbid")

    query: str | None = None
    parameters: dict[str, Any] | list[Any] | None = None
    limit: int | None = Field(None, ge=0)
    page_size: int | None = Field(None, ge=1)
    cursor: str | None = None


class ExplainRequest(BaseModel):
    """Body of `/explain`. `mode`: a mode of Spark's EXPLAIN."""

    model_config = ConfigDict(extra="forbid")

    query: str
    parameters: dict[str, Any] | list[Any] | None = None
    mode: Literal["simple", "extended", "codegen", "cost", "formatted"] = "formatted"


class SqlData:
    """The views of this worker's key, or the reason why there are none; a cache of checked queries. Thread-safe."""

    def __init__(
        self,
        session: Any,
        config: SqlConfig,
        key: str,
        *,
        pool: str = "",
        remembers_schemas: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`remembers_schemas`: other workers may open the same files."""
        self.session = session
        self.config = config
        self.key = key
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self.files = DataFiles({}, complete=False)
        """The files of the data, as they were just before it was opened."""
        self._views: tuple[View, ...] = ()
        self._live = LiveViews(session, ())
        self._generation = 0
        """Changes when a view is opened again: a plan that was made before has the former rows."""
        self._deferred = DeferredViews(session, (), self.files)
        self._remembers_schemas = remembers_schemas
        self._problem: DataProblemError | None = None
        self._tried_at = 0.0
        self._remembered: Remembered[PreparedQuery | None] = Remembered(
            count=_REMEMBERED_QUERIES, max_bytes=config.remembered_plan_bytes
        )
        self._plan_limits = PlanLimits(**{field.name: getattr(config, field.name) for field in fields(PlanLimits)})
        self.results = StoredResults(config.paging, pool=pool, key=key)
        self.exports = Exports(config.export, self.results, pool=pool, key=key)
        self._text_limits = TextLimits(length=config.max_query_length, nesting=config.max_query_nesting)
        self.caching = BackgroundCaching(session, key, {}, self._remembered.clear)

    @property
    def is_fixed(self) -> bool:
        """Whether a query reads the data as it was when it was opened. Tables of some formats are read as they are when
        the query runs."""
        return self._problem is None and not any(view.format in TRANSACTIONAL for view in self._views)

    @property
    def problem(self) -> DataProblemError | None:
        return self._problem

    def load(self, former: SqlData | None = None) -> None:
        """Open the data. A problem of this key is kept for `views`; other exceptions are raised.

        `former`: the data that is in use, of another session.
        """
        self._tried_at = self._monotonic()
        try:
            dataset = dataset_of(self.config, self.key, self.session)
            # Before the data is opened: a change that comes in between is seen as one later.
            self.files = self._list(dataset)
            reason = self.files.being_written(None if former is None else former.files)
            if reason is not None:
                raise DataProblemError(reason, code=503, error_code="dataset_incomplete", can_change=True)
            # Data that several keys read is cached once, but never shared with an earlier load of the same files: that
            # one is removed from memory when its last request has ended. Files that cannot be listed may have changed.
            mark = (self.files.signature if former is None else None) or uuid.uuid4().hex
            # Before the views are opened: a commit that comes in between is seen by the first query.
            self._live = LiveViews(self.session, dataset.tables)
            if former is None:
                views = self._first_views(dataset, mark)
            else:
                # All of them are opened: the request that waits must get an answer, also if files change all the time.
                views = load(self.session, dataset, mark=mark, shared=False)
            self._deferred = DeferredViews(self.session, views, self.files)
            self._views, self._problem = views, None
            # The views are new: a thread that still caches the former ones would fill the memory with unused data.
            self.caching.close()
            to_cache = {view.name: view.to_cache for view in self._views if view.to_cache is not None}
            self.caching = BackgroundCaching(self.session, self.key, to_cache, self._remembered.clear, mark)
        except DataProblemError as problem:
            log.warning("no data for this key", reason=problem.message, error_code=problem.error_code)
            self._problem = problem

    def _list(self, dataset: ResolvedDataset) -> DataFiles:
        """The files of the data. Those that are not local are listed for watched data only: it may cost money."""
        remote = dataset.watch and hasattr(self.session, "_jsparkSession")
        return data_files(dataset.tables, partial(list_files, self.session) if remote else None)

    def _first_views(self, dataset: ResolvedDataset, mark: str) -> tuple[View, ...]:
        known = remembered_schemas(self.session)
        schemas = known if self._remembers_schemas else None
        shared = self.files.signature is not None
        return load(self.session, dataset, mark=mark, shared=shared, files=self.files, schemas=schemas)

    def log_views(self) -> None:
        """Log which views are open, if any."""
        if self._problem is None:
            cached = [view.name for view in self._views if view.cached]
            deferred = sorted(self._deferred.names)
            log.info("views loaded", views=[view.name for view in self._views], cached=cached, deferred=deferred)

    def unload(self) -> None:
        """Stop caching, and remove what was cached."""
        self.caching.close(drop=True)
        drop_cached(self.session, (view.name for view in self._views if view.cached))

    def newest_version(self, current: int | None) -> int | None:
        """The version of the files as they are now, if the dataset is watched; `current`: of the data in use."""
        try:
            dataset = dataset_of(self.config, self.key, self.session)
        except DataProblemError:
            return None
        if not dataset.watch:
            return None
        files = self._list(dataset)
        newest = files.newest_ms
        if newest is None:
            log.warning("dataset cannot be watched, its files cannot be listed", key=self.key)
            return None
        if current is None:
            return newest
        if files.being_written(self.files) is not None:
            # Half-written data is not served: the data in use stays until the write has ended.
            return current
        # The clock of a file system has a limited resolution, and a removed file has no time.
        changed = files.signature != self.files.signature
        return max(newest, current + 1) if changed else max(newest, current)

    def has_changed(self, failure: SparkFailure) -> bool:
        """Whether a query may have failed because files were changed or removed since they were opened."""
        if self._live.has_tables and is_lost_file(failure):
            # Retention deletes files an hour after they were removed from the table: the query ran for that long.
            return True
        before = self.files.signature
        if before is not None:
            return self._list(dataset_of(self.config, self.key, self.session)).signature != before
        # Files that cannot be listed: only Spark's error is known.
        return is_lost_file(failure)

    def views(self) -> tuple[View, ...]:
        """The views; those of telemetry with the commits of this moment. Raises `RequestError` if there are none.

        Tries again to open data that was missing.
        """
        with self._lock:
            waited = self._monotonic() - self._tried_at
            # At most once in the interval: each attempt lists files, and every request of the key waits for it.
            if self._problem and self._problem.can_change and waited >= self.config.retry_missing_interval:
                self.load()
                self.log_views()
            if self._problem:
                raise self._problem.refusal()
            self._renew()
            return self._views

    def _renew(self) -> None:
        try:
            if self._live.renew():
                self._generation += 1
                self._remembered.clear()
        except DataProblemError as problem:
            raise problem.refusal() from None

    def open_views(self, names: Collection[str]) -> None:
        """Open those of the views that are deferred (see `DeferredViews.open`), last values that have changed, and
        views of the information schema."""
        for name in self._of_information_schema(names):
            rows = information_schema(name, self._views)
            self.session.createDataFrame(rows).createOrReplaceTempView(name)
        self._deferred.open(names)
        try:
            self._live.open_last_values(names)
        except DataProblemError as problem:
            raise problem.refusal() from None

    def _of_information_schema(self, names: Collection[str]) -> frozenset[str]:
        return INFORMATION_VIEWS.intersection(names).difference(view.name for view in self._views)

    def prepared(self, query: str, parameters: Parameters | None = None) -> PreparedQuery:
        """The checked query, ready to run. Raises `QueryRefusedError`, or Spark's error."""
        columns = self._columns()
        remembered = None
        if length_of(query, parameters) <= _REMEMBERED_LENGTH:
            remembered = self._remembered.get(
                (query, cache_key(parameters), frozenset(columns), self._generation),
                lambda: self._prepare_repeatable(query, columns, parameters),
            )
        return remembered or prepare(self.check(query, columns, parameters).frame)

    def frame(self, query: str, parameters: Parameters | None = None) -> Any:
        """The checked query as a new DataFrame, not yet run. Raises as `prepared` does."""
        return self.check(query, self._columns(), parameters).frame

    def _columns(self) -> dict[str, int]:
        """The number of columns of each view."""
        return {view.name: len(view.columns) for view in self.views()}

    def check(self, query: str, columns: Mapping[str, int], parameters: Parameters | None = None) -> CheckedQuery:
        """Run the guard and the limits. Their result depends only on the text of the query, its parameters, and the
        names and numbers of columns of the views."""

        def check_plan(parsed: ParsedQuery) -> None:
            check_limits(parsed.description, self._plan_limits, views={**INFORMATION_WIDTHS, **columns})

        # With the values in their places: the limit must hold for the text that Spark gets to plan.
        length = length_of(query, parameters)
        if parameters is not None and length > self.config.max_query_length:
            raise QueryRefusedError(
                f"The query has up to {length} characters with its parameters in place; the limit is "
                f"{self.config.max_query_length} (max_query_length).",
                error_code="query_too_complex",
                code=400,
            )
        if len(query) <= self.config.max_query_length:  # otherwise the guard refuses it
            check_text(query, self._plan_limits)
        return checked_query(
            self.session,
            query,
            views=frozenset(columns),
            limits=self._text_limits,
            parameters=parameters,
            check_plan=check_plan,
            open_views=self.open_views,
            allow_unguarded=self.config.allow_unguarded,
        )

    def _prepare_repeatable(
        self, query: str, columns: Mapping[str, int], parameters: Parameters | None
    ) -> tuple[PreparedQuery | None, int]:
        """The checked query if it may run again without a new analysis, otherwise None; and its size in the cache."""
        checked = self.check(query, columns, parameters)
        # Both are read when the query is checked. The rows of the information schema would be in the plan, uncounted.
        if self._live.has_last_values(checked.named) or self._of_information_schema(checked.named):
            return None, len(query)
        if checked.analyzed is None or not is_repeatable(checked.frame, checked.analyzed):
            return None, len(query)
        return prepare(checked.frame), len(query) + memory_bytes(checked.analyzed)


@app.on_start
def open_data(context: Context) -> SqlData:
    data = SqlData(context.session, parse_config(context.config), context.key, pool=context.pool)
    load_plan_walker(context.session)
    data.load()
    data.log_views()
    return data


@app.newest_version
def newest_version(context: Context) -> int | None:
    data: SqlData | None = context.state
    if data is None:
        data = SqlData(context.session, parse_config(context.config), context.key, pool=context.pool)
    return data.newest_version(context.data_version)


@app.on_reload
def reload_data(context: Context) -> SqlData:
    former: SqlData = context.state
    data = SqlData(context.session, former.config, former.key, pool=context.pool)
    data.load(former)
    if data.problem is not None and former.problem is None:
        # The former views stay. Some of their data may be in memory.
        raise data.problem.refusal()
    data.log_views()
    data.caching.request_ended()
    return data


@app.on_unload
def unload_data(context: Context) -> None:
    data: SqlData = context.state
    data.unload()


@app.on_stop
def stop_caching(context: Context) -> None:
    data: SqlData = context.state
    # Not left to the end of the session: data that another key of the process has cached first belongs to that key, and
    # would stay until it ends.
    with suppress(Exception):  # the JVM may have ended
        data.unload()


def _coalesces(call: Call) -> bool | None:
    """Whether this query shares the run of an identical one; None: the route decides."""
    data: SqlData = call.context.state
    # A query that comes after a write must not get the answer of one that began before it.
    if not data.is_fixed or len(call.body) > _LARGEST_SHARED or _RUNS_BY_ITSELF.search(call.body) is not None:
        return False
    return True if data.config.coalesce else None


@app.handler("/sql", abandonable=True, coalesce=_coalesces)
def sql(call: Call, request: SqlRequest) -> Answer:
    data: SqlData = call.context.state
    if request.cursor is not None:
        return _next_page(call, data, request)
    query = request.query
    if query is None:
        missing = [{"field": "query", "message": "Field required"}]
        raise RequestError("Field query is missing.", error_code="invalid_request", details={"fields": missing})
    parameters = read_parameters(request.parameters)
    shown = table_of(query, views=data.views, explain=lambda text, mode: _explained(data, text, parameters, mode))
    if shown is not None:
        return Answer(first_rows(shown, _row_limit(data.config, request.limit)))
    if request.page_size is not None:
        return _first_page(call, data, query, parameters, size=request.page_size, limit=request.limit)
    if call.stream_bytes is not None and is_streamable(data.session):
        try:
            # The client fetches its parts as it reads them: only the limit of the request applies.
            prepared = _guarded(data, lambda: data.prepared(query, parameters))
            # The query runs later, while its parts are sent.
            return Answer(StreamedFrame(prepared, request.limit, guard=lambda run: _guarded(data, run)))
        finally:
            data.caching.request_ended()
    limit = _row_limit(data.config, request.limit)

    def run() -> Rows:
        prepared = data.prepared(query, parameters)
        _check_least_size(call, prepared, limit)
        return prepared.run(limit=limit)

    try:
        rows = _guarded(data, run)
    finally:
        # Also after a refusal: caching waits for the end of the first request, however that ends.
        data.caching.request_ended()
    return rows.answer(Answer(), accept=call.accept)


def _check_least_size(call: Call, query: PreparedQuery, limit: int) -> None:
    """Refuse a query whose answer fits into no message, whatever its values are, before it runs."""
    if call.max_bytes is None:
        return
    least = least_bytes(query, limit=limit, arrow=wants_arrow(call.accept), above=call.max_bytes)
    if least is not None:
        raise answer_too_large(f"would have at least {least} bytes", least, call.max_bytes)


def _first_page(
    call: Call, data: SqlData, query: str, parameters: Parameters | None, *, size: int, limit: int | None
) -> Answer:
    size = _row_limit(data.config, size, name="page_size")

    def run() -> Page:
        prepared = data.prepared(query, parameters)
        return data.results.first_page(
            prepared,
            size=size,
            limit=limit,
            data_version=call.context.data_version,
            check=call.raise_if_cancelled,
        )

    try:
        page = _guarded(data, run)
    finally:
        data.caching.request_ended()
    return page.answer(accept=call.accept)


def _next_page(call: Call, data: SqlData, request: SqlRequest) -> Answer:
    assert request.cursor is not None
    if request.query is not None or request.parameters is not None or request.limit is not None:
        raise RequestError(
            "cursor belongs to a query that has run; send it without query, parameters and limit.",
            error_code="invalid_request",
        )
    size = _row_limit(data.config, request.page_size, name="page_size")
    # The data in use may be newer than the stored rows.
    required = required_data_version(call.headers)
    return data.results.page(request.cursor, size=size, required_version=required).answer(accept=call.accept)


@app.handler("/export", abandonable=True)
def export(call: Call, request: ExportRequest) -> Answer:
    data: SqlData = call.context.state
    data.exports.directory()  # refused before the query is read
    parameters = read_parameters(request.parameters)

    def run() -> dict[str, Any]:
        prepared = data.prepared(request.query, parameters)
        return data.exports.run(data.session, prepared, call, request)

    try:
        manifest = _guarded(data, run)
    finally:
        data.caching.request_ended()
    # An export that is found again may have been computed from earlier data than that in use.
    return Answer(manifest, headers={DATA_VERSION_HEADER: manifest.get("data_version")})


@app.batch_handler("/lookup", max_size=MAX_BATCH, max_wait="10ms")
def lookup(calls: list[Call], requests: list[LookupRequest]) -> list[Answer | RequestError]:
    data: SqlData = calls[0].context.state
    try:
        views = data.views()
    except RequestError as problem:
        # Of the key, and not of one of the requests: a batch that raises is run again in halves.
        return [problem] * len(calls)
    limit = data.config.lookup_row_limit

    def run() -> list[Answer | RequestError]:
        data.open_views({request.table.lower() for request in requests})
        return look_up(data.session, views, calls, requests, row_limit=limit)

    try:
        return _guarded(data, run)
    finally:
        data.caching.request_ended()


@app.handler("/explain", abandonable=True)
def explain(call: Call, request: ExplainRequest) -> dict[str, str]:
    data: SqlData = call.context.state
    parameters = read_parameters(request.parameters)
    return {"plan": _explained(data, request.query, parameters, request.mode), "mode": request.mode}


def _explained(data: SqlData, query: str, parameters: Parameters | None, mode: str) -> str:
    return _guarded(data, lambda: explained_plan(data.frame(query, parameters), mode))


@app.handler("/schema")
def schema(call: Call) -> dict[str, Any]:
    data: SqlData = call.context.state
    return {"views": [_described(view) for view in data.views()]}


@app.handler("/cache_status")
def cache_status(call: Call) -> dict[str, Any]:
    data: SqlData = call.context.state
    return {"views": [_cached(data.session, view) for view in data.views()]}


@app.handler("/version")
def versions(call: Call) -> dict[str, str]:
    data: SqlData = call.context.state
    data.views()
    return {
        "osrdyne": version("osrdyne"),
        "spark": data.session.version,
        "python": platform.python_version(),
        "key": data.key,
    }


def _cached(session: Any, view: View) -> dict[str, Any]:
    """A view, and what Spark stores of it; nothing is known with Spark Connect."""
    is_cached = view.cached and bool(session.catalog.isCached(view.name))
    infos = stored_data(session, view.name) if is_cached and hasattr(session, "_jsparkSession") else []
    return {
        "view": view.name,
        "cached": is_cached,
        "partitions": sum(info.numPartitions() for info in infos),
        "cached_partitions": sum(info.numCachedPartitions() for info in infos),
        "memory_bytes": sum(info.memSize() for info in infos),
        "disk_bytes": sum(info.diskSize() for info in infos),
    }


def _described(view: View) -> dict[str, Any]:
    columns = [{"name": name, "type": kind, "nullable": nullable} for name, kind, nullable in view.columns]
    return {
        "name": view.name,
        "format": view.format,
        "cached": view.cached,
        "columns": columns,
        "key_columns": list(view.key_columns),
        **({"dropped_columns": dict(view.dropped)} if view.dropped else {}),
        **({} if view.problem is None else {"problem": view.problem.message}),
    }


def _row_limit(config: SqlConfig, requested: int | None, *, name: str = "limit") -> int:
    limit = config.row_limit if requested is None else requested
    if limit > config.max_row_limit:
        raise RequestError(
            f"{name} is {limit}; this pool answers with at most {config.max_row_limit} rows (max_row_limit).",
            400,
            "limit_too_large",
        )
    return limit


def _guarded(data: SqlData, run: Callable[[], ValueT]) -> ValueT:
    """Call `run`; turn a refusal or an error of Spark into an answer of one line.

    Raises `DataChangedError` if the files of the data have changed: the query may have failed because of that.
    Exceptions of a lost JVM are raised unchanged: the runtime then rejects the request and exits.
    """
    try:
        return run()
    except QueryRefusedError as refused:
        raise RequestError(refused.message, refused.code, refused.error_code, refused.details()) from None
    except Exception as error:
        failure = describe(error)
        if failure is None:
            raise
        if not failure.exhausted and data.has_changed(failure):
            raise DataChangedError(
                f"The files of the data have changed since they were opened: {failure.message}",
                {"condition": failure.condition},
            ) from None
        if not failure.is_query and not failure.exhausted:
            if not sessions.is_alive(data.session):
                # The session is lost: the runtime must get this error, reject the request and end the worker.
                raise
            log.warning("query failed in Spark", condition=failure.condition, reason=failure.message)
        if failure.condition.startswith("FAILED_READ_FILE"):
            raise RequestError(failure.message, 500, UNREADABLE, {"condition": failure.condition}) from None
        raise failure.refusal() from None


class Remembered(Generic[ValueT]):
    """A cache of at most `count` values with at most `max_bytes` in total. Thread-safe.

    The least recently used value is evicted first. Two threads may make the value of one key at the same time; one
    value is cached.
    """

    def __init__(self, *, count: int, max_bytes: int) -> None:
        self._count = count
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[ValueT, int]] = OrderedDict()
        self._bytes = 0
        self._cleared = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Forget all values, also those that are being made."""
        with self._lock:
            self._values.clear()
            self._bytes = 0
            self._cleared += 1

    def get(self, key: Hashable, make: Callable[[], tuple[ValueT, int]]) -> ValueT:
        """The value of `key`. If it is not cached, `make` returns the value and its size in bytes, or raises."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            cleared = self._cleared
        # Without the lock: an analysis takes long, and other queries must not wait for it.
        value, size = make()
        with self._lock:
            # A value that was begun before `clear` is as outdated as those that it has removed.
            if cleared == self._cleared and key not in self._values and size * LARGEST_SHARE <= self._max_bytes:
                self._values[key] = (value, size)
                self._bytes += size
                while self._bytes > self._max_bytes or len(self._values) > self._count:
                    _, (_, freed) = self._values.popitem(last=False)
                    self._bytes -= freed
            return self._values[key][0] if key in self._values else value

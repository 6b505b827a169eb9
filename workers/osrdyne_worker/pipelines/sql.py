"""The SQL pipeline: answers queries over the data of its key. Its application: `osrdyne_worker.pipelines.sql:app`.

This module has the handlers. `guard` decides which queries may run, `datasets` and `loading` provide the data. Spark
evaluates no query that the guard has not accepted. See docs/reference/sql-pipeline/restrictions.md.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from osrdyne.errors import ConfigurationError
from osrdyne.logs import get_logger
from osrdyne_worker import Answer, App, Call, Context, RequestError
from osrdyne_worker.pipelines.caching import BackgroundCaching, cached_name
from osrdyne_worker.pipelines.datasets import SqlConfig, parse_config
from osrdyne_worker.pipelines.guard import CheckedQuery, checked_query
from osrdyne_worker.pipelines.limits import PlanLimits, check_limits, check_named_windows, check_text
from osrdyne_worker.pipelines.loading import DataProblemError, View, load
from osrdyne_worker.pipelines.parameters import cache_key, length_of, read_parameters
from osrdyne_worker.pipelines.refusals import QueryRefusedError
from osrdyne_worker.pipelines.sql_guard import Limits
from osrdyne_worker.spark.errors import describe
from osrdyne_worker.spark.parameters import Parameters
from osrdyne_worker.spark.plans import ParsedQuery, explained_plan, is_repeatable, load_plan_walker, memory_bytes
from osrdyne_worker.spark.results import PreparedQuery, prepare
from osrdyne_worker.spark.session import SparkSessions, is_connect

log = get_logger(__name__)

ValueT = TypeVar("ValueT")

REQUIRED_SETTINGS = {
    # Spark would replace ${...} in a query by settings and environment variables, secrets included.
    "spark.sql.variable.substitute": "false",
    # A second defence: csv.`/etc/passwd` is not a table.
    "spark.sql.runSQLOnFiles": "false",
    # Spark would evaluate a VALUES clause during parsing, before any check.
    "spark.sql.parser.eagerEvalOfUnresolvedInlineTable": "false",
    # Spark opens the files in options of functions with Hadoop's file systems; these ones would request a URL.
    **{f"spark.hadoop.fs.{scheme}.impl": "osrdyne.refused" for scheme in ("http", "https", "ftp", "sftp")},
}

# XML in a query must not make the JVM read files or request URLs.
REQUIRED_JAVA_OPTIONS = " ".join(f"-Djavax.xml.accessExternal{kind}=" for kind in ("DTD", "Schema", "Stylesheet"))

_REMEMBERED_QUERIES = 200
_REMEMBERED_LENGTH = 10_000
LARGEST_SHARE = 4
"""A value larger than `max_bytes` divided by this is not cached: it would evict too many others."""


class GuardedSessions(SparkSessions):
    """Sessions whose plans can be checked. Refuses Spark Connect, where plans stay on the server."""

    def build(self, context: Context) -> Any:
        master = str((context.worker_config.get("spark") or {}).get("master") or "")
        if is_connect(master) and not parse_config(context.config).allow_unguarded:
            raise ConfigurationError(
                "worker.spark_master is a Spark Connect address: the SQL pipeline cannot check the plans of queries "
                "there, and a query may read anything that the server can read. Use another master, or set "
                "worker.config.allow_unguarded: true."
            )
        return super().build(context)


sessions = GuardedSessions(required=REQUIRED_SETTINGS, java_options=REQUIRED_JAVA_OPTIONS)
app = App(sessions=sessions, check_config=parse_config, poolable=True)


class SqlRequest(BaseModel):
    """Body of `/sql`. `limit`: the maximum number of rows in the answer. `parameters`: the values of the query's
    parameters, by name (`:name`) or by position (`?`)."""

    model_config = ConfigDict(extra="forbid")

    query: str
    parameters: dict[str, Any] | list[Any] | None = None
    limit: int | None = Field(None, ge=0)


class ExplainRequest(BaseModel):
    """Body of `/explain`. `mode`: a mode of Spark's EXPLAIN."""

    model_config = ConfigDict(extra="forbid")

    query: str
    parameters: dict[str, Any] | list[Any] | None = None
    mode: Literal["simple", "extended", "codegen", "cost", "formatted"] = "formatted"


class SqlData:
    """The views of this worker's key, or the reason why there are none; a cache of checked queries. Thread-safe."""

    def __init__(
        self, session: Any, config: SqlConfig, key: str, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.session = session
        self.config = config
        self.key = key
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._views: tuple[View, ...] = ()
        self._problem: DataProblemError | None = None
        self._tried_at = 0.0
        self._remembered: Remembered[PreparedQuery | None] = Remembered(
            count=_REMEMBERED_QUERIES, max_bytes=config.remembered_plan_bytes
        )
        self._plan_limits = PlanLimits(**{field.name: getattr(config, field.name) for field in fields(PlanLimits)})
        self._limits = Limits(length=config.max_query_length, nesting=config.max_query_nesting)
        self.caching = BackgroundCaching(session, key, {}, self._remembered.clear)

    def load(self) -> None:
        """Open the data. A problem of this key is kept for `views`; other exceptions are raised."""
        self._tried_at = self._monotonic()
        try:
            self._views, self._problem = load(self.session, self.config, self.key), None
            # The views are new: a thread that still caches the former ones would fill the memory with unused data.
            self.caching.close()
            to_cache = {view.name: view.to_cache for view in self._views if view.to_cache is not None}
            self.caching = BackgroundCaching(self.session, self.key, to_cache, self._remembered.clear)
        except DataProblemError as problem:
            log.warning("no data for this key", reason=problem.message, error_code=problem.error_code)
            self._problem = problem

    def views(self) -> tuple[View, ...]:
        """The views. Raises `RequestError` if there are none. Tries again to open data that was missing."""
        with self._lock:
            waited = self._monotonic() - self._tried_at
            # At most once in the interval: each attempt lists files, and every request of the key waits for it.
            if self._problem and self._problem.can_change and waited >= self.config.retry_missing_interval:
                self.load()
            if self._problem:
                raise RequestError(self._problem.message, self._problem.code, self._problem.error_code)
            return self._views

    def prepared(self, query: str, parameters: Parameters | None = None) -> PreparedQuery:
        """The checked query, ready to run. Raises `QueryRefusedError`, or Spark's error."""
        columns = self._columns()
        remembered = None
        if length_of(query, parameters) <= _REMEMBERED_LENGTH:
            remembered = self._remembered.get(
                (query, cache_key(parameters), frozenset(columns)),
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
            check_limits(str(parsed.plan.toJSON()), self._plan_limits, views=columns)
            check_named_windows(parsed.description)

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
            limits=self._limits,
            parameters=parameters,
            check_plan=check_plan,
            allow_unguarded=self.config.allow_unguarded,
        )

    def _prepare_repeatable(
        self, query: str, columns: Mapping[str, int], parameters: Parameters | None
    ) -> tuple[PreparedQuery | None, int]:
        """The checked query if it may run again without a new analysis, otherwise None; and its size in the cache."""
        checked = self.check(query, columns, parameters)
        if checked.analyzed is None or not is_repeatable(checked.frame, checked.analyzed):
            return None, len(query)
        return prepare(checked.frame), len(query) + memory_bytes(checked.analyzed)


@app.on_start
def open_data(context: Context) -> SqlData:
    data = SqlData(context.session, parse_config(context.config), context.key)
    load_plan_walker(context.session)
    data.load()
    return data


@app.on_stop
def stop_caching(context: Context) -> None:
    data: SqlData = context.state
    data.caching.close()


@app.handler("/sql", abandonable=True)
def sql(call: Call, request: SqlRequest) -> Answer:
    data: SqlData = call.context.state
    limit = _row_limit(data.config, request.limit)
    parameters = read_parameters(request.parameters)
    try:
        rows = _guarded(data.session, lambda: data.prepared(request.query, parameters).run(limit=limit))
    finally:
        # Also after a refusal: caching waits for the end of the first request, however that ends.
        data.caching.request_ended()
    return rows.answer(Answer(), accept=call.accept)


@app.handler("/explain", abandonable=True)
def explain(call: Call, request: ExplainRequest) -> dict[str, str]:
    data: SqlData = call.context.state
    parameters = read_parameters(request.parameters)
    plan = _guarded(data.session, lambda: explained_plan(data.frame(request.query, parameters), request.mode))
    return {"plan": plan, "mode": request.mode}


@app.handler("/schema")
def schema(call: Call) -> dict[str, Any]:
    data: SqlData = call.context.state
    return {"views": [_described(view) for view in data.views()]}


@app.handler("/cache_status")
def cache_status(call: Call) -> dict[str, Any]:
    data: SqlData = call.context.state
    stored = _stored(data.session)
    return {
        "views": [
            {
                "view": view.name,
                "cached": view.cached and bool(data.session.catalog.isCached(view.name)),
                **stored.get(cached_name(view.name), _NOT_STORED),
            }
            for view in data.views()
        ]
    }


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


_NOT_STORED = {"partitions": 0, "cached_partitions": 0, "memory_bytes": 0, "disk_bytes": 0}


def _stored(session: Any) -> Mapping[str, dict[str, int]]:
    """The figures of Spark's caches, by name; empty with Spark Connect."""
    if not hasattr(session, "_jsparkSession"):
        return {}
    return {
        info.name(): {
            "partitions": info.numPartitions(),
            "cached_partitions": info.numCachedPartitions(),
            "memory_bytes": info.memSize(),
            "disk_bytes": info.diskSize(),
        }
        for info in session.sparkContext._jsc.sc().getRDDStorageInfo()
    }


def _described(view: View) -> dict[str, Any]:
    columns = [{"name": name, "type": kind, "nullable": nullable} for name, kind, nullable in view.columns]
    return {"name": view.name, "format": view.format, "cached": view.cached, "columns": columns}


def _row_limit(config: SqlConfig, asked: int | None) -> int:
    limit = config.row_limit if asked is None else asked
    if limit > config.max_row_limit:
        raise RequestError(
            f"limit is {limit}; this pool answers with at most {config.max_row_limit} rows (max_row_limit).",
            400,
            "limit_too_large",
        )
    return limit


def _guarded(session: Any, run: Callable[[], ValueT]) -> ValueT:
    """Call `run`; turn a refusal or an error of Spark into an answer of one line.

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
        if not failure.is_query and not failure.exhausted:
            if not sessions.is_alive(session):
                # The session is gone: the runtime must see this, reject the request and end the worker.
                raise
            log.warning("query failed in Spark", condition=failure.condition, reason=failure.message)
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

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], tuple[ValueT, int]]) -> ValueT:
        """The value of `key`. If it is not cached, `make` returns the value and its size in bytes, or raises."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        # Without the lock: an analysis takes long, and other queries must not wait for it.
        value, size = make()
        with self._lock:
            if key not in self._values and size * LARGEST_SHARE <= self._max_bytes:
                self._values[key] = (value, size)
                self._bytes += size
                while self._bytes > self._max_bytes or len(self._values) > self._count:
                    _, (_, freed) = self._values.popitem(last=False)
                    self._bytes -= freed
            return self._values[key][0] if key in self._values else value

"""The application: hooks and handlers that the author of a worker registers. No I/O, no broker, no Spark.

The runtime reads an `App` once at start (`App.registered_handlers`) and calls its functions.

    app = App()

    @app.on_start
    def load(context: Context) -> Tables: ...

    @app.handler("/count")
    def count(call: Call, request: CountRequest) -> dict[str, int]: ...
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.names import Key

if TYPE_CHECKING:
    from osrdyne_worker.app.call import Call
    from osrdyne_worker.app.errors import RequestError
    from osrdyne_worker.app.tables import Rows

ROW_LIMIT = 10_000
"""The default maximum number of rows of an answer; the SQL pipeline has the same default."""

AnyFunction = Callable[..., Any]
FunctionT = TypeVar("FunctionT", bound=AnyFunction)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Context:
    """The identity, configuration and state of a worker; the same object for every request.

    `config` is the application's own configuration, `worker_config` the whole `WORKER_CONFIG` document (`runtime`,
    `spark`, `app`). `session` is the result of the session factory (a SparkSession; None without a factory), `state`
    the result of `on_start`. While the session is built, both are None; in `on_start`, `state` is None.
    `data_version` is the version of the data in `state`, None if unknown. A reload makes a new context, with a copy of
    the session; requests that began before keep theirs.
    """

    key: Key
    pool: str = ""
    worker_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    worker_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    session: Any = field(default=None, repr=False)
    state: Any = field(default=None, repr=False)
    data_version: int | None = None


class EarlyStart:
    """Lets the session factory of an application start a process while the application is still being imported.

    `context`: of the worker, as far as it is known before the import. `is_shared`: the session will be shared by the
    keys of a pooled process.
    """

    def __init__(self, context: Context, *, is_shared: bool = False) -> None:
        self.context = context
        self.is_shared = is_shared
        self._owner: object = None
        self._discard: Callable[[], None] | None = None

    @property
    def is_taken(self) -> bool:
        return self._owner is not None

    def take(self, owner: object, discard: Callable[[], None]) -> None:
        """Record that `owner` has started a process, which `discard` ends."""
        self._owner, self._discard = owner, discard

    def settle(self, sessions: object) -> None:
        """End the started process if its owner is not `sessions`, the session factory of the application."""
        if self._discard is not None and self._owner is not sessions:
            self._discard()
            self._discard = None


importing: ContextVar[EarlyStart | None] = ContextVar("importing", default=None)
"""Set while a process imports its application."""


class SessionFactory(Protocol):
    """Builds the session of a worker (a SparkSession) and controls the jobs in it.

    Every method may block: the runtime calls them in threads. `group_id` identifies the jobs of one request; a factory
    cancels these jobs and no others.
    """

    def build(self, context: Context) -> Any:
        """Build the session; called once, before `on_start`. `context.session` and `context.state` are None."""
        ...

    def run_in_group(self, session: Any, group_id: str, function: Callable[[], ResultT]) -> ResultT:
        """Call `function` in this thread with its jobs in the group; return its result or raise its exception."""
        ...

    def cancel(self, session: Any, group_id: str) -> None:
        """Cancel the group's jobs, including jobs that it starts later: the function should then fail soon."""
        ...

    def progress(self, session: Any, group_id: str) -> Mapping[str, int]:
        """The progress of the group: `jobs` (running), `tasks_done`, `tasks_total`. Called every few seconds."""
        ...

    def request_session(self, session: Any) -> Any:
        """The session of one request (`Call.session`): other requests do not see the views, settings and functions that
        it adds.

        Called at most once for a request, before the request uses it. Its jobs belong to the group of the thread.
        """
        ...

    def refusal(self, error: Exception) -> RequestError | None:
        """The answer to a request whose handler raised an error of the session (of Spark); None for other errors."""
        ...

    def rows(self, value: Any, *, limit: int) -> Rows | None:
        """The first `limit` rows of `value` if it is a frame of such a session (a DataFrame of Spark); else None.

        Called within `run_in_group` with the result of a handler, of any type.
        """
        ...

    def is_alive(self, session: Any) -> bool:
        """False if the session is lost (the JVM is gone): the worker then exits and is replaced."""
        ...

    def stray_tasks(self, session: Any) -> Mapping[str, int]:
        """The number of running tasks of each ended group, that is, tasks that ignore a cancel. Empty if unknown."""
        ...

    def close(self, session: Any) -> None:
        """Release the session; called once, also if `on_start` failed."""
        ...


MAX_BATCH_SIZE = 10_000
MAX_BATCH_WAIT = 10.0


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How the runtime collects calls for a batch handler: at most `max_size` calls, and for at most `max_wait`
    seconds."""

    max_size: int = 256
    max_wait: float = 0.02


class KeySessions(SessionFactory, Protocol):
    """Builds the session of one key in a process with other keys. `close` may be called more than once."""

    def enter_thread(self) -> None:
        """Called first in each thread that runs hooks or handlers of the key, and before `build`."""
        ...


class PoolableSessions(SessionFactory, Protocol):
    """A session factory for pooled processes: the sessions of all keys share the result of `build_shared`.

    `is_alive` and `close` also accept the shared session.
    """

    def build_shared(self, context: Context) -> Any:
        """Build and warm up the shared session; called once. `context` belongs to the process."""
        ...

    def for_key(self, shared: Any) -> KeySessions:
        """The session factory of one more key. Its session does not see the sessions of other keys."""
        ...

    def heap(self, shared: Any) -> tuple[int, int] | None:
        """Bytes of the heap in use, without garbage if that is known, and its maximum; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """A handler with its path and options. `takes_request`: it takes the decoded body as second argument. `row_limit`:
    the maximum number of rows of its answers; `stream_limit`: of its streamed answers, None without a limit. `batch`:
    it takes lists of calls and requests, and returns a list of answers. `coalesce`: whether one call answers identical
    requests, or a function of the call that decides it; None: the route of the request decides."""

    path: str
    function: AnyFunction
    is_async: bool
    takes_request: bool
    request_type: Any = None
    abandonable: bool = False
    row_limit: int = ROW_LIMIT
    stream_limit: int | None = None
    batch: BatchOptions | None = None
    coalesce: bool | Callable[[Call], bool | None] | None = None


class App:
    """Hooks and handlers of one application.

    `sessions` builds the worker's session (`osrdyne_worker.spark.session:SparkSessions`); None: no session.
    `check_config` is called with `worker.config` before anything starts, also by `osrdyne check-config`. It raises
    `ConfigurationError` or an error of pydantic (pass `MyModel.model_validate`); its result is not used.

    With `poolable`, workers of several keys may run in one process: hooks and handlers store all data of a key in
    `context.session` and `context.state`, never in globals, and the authors of all keys trust each other. `sessions`
    must then be `PoolableSessions`, as Spark's are.

    A handler is `(call: Call)` or `(call: Call, request: T)`. A plain function runs in a thread, a coroutine function
    on the event loop, which it must not block. `T` is a pydantic model, a dataclass, or any type that pydantic can
    validate: the JSON body is decoded into it, and an invalid body is answered `error` with code 400 and the paths of
    the invalid fields. `bytes` and `str` take the body undecoded.

    A handler returns an `Answer`, or a value that becomes one: bytes, str, a pydantic model, a dataclass, any other
    value that JSON can represent, or None for an empty answer. A Spark DataFrame, a pandas DataFrame, a pyarrow Table
    or an iterator of record batches is answered as rows: JSON, or an Arrow IPC stream if the caller accepts one. To
    refuse a request it raises `RequestError`; any other exception is logged and answered `error` with code 500.
    """

    def __init__(
        self,
        *,
        sessions: SessionFactory | None = None,
        check_config: Callable[[Mapping[str, Any]], object] | None = None,
        poolable: bool = False,
    ) -> None:
        if poolable and sessions is not None and not is_poolable(sessions):
            raise ConfigurationError(
                f"App(poolable=True): {type(sessions).__name__} has no build_shared, for_key and heap "
                "(osrdyne_worker.app.app.PoolableSessions); add them, or leave poolable out."
            )
        self.sessions = sessions
        self.check_config = check_config
        self.poolable = poolable
        self._start: AnyFunction | None = None
        self._stop: AnyFunction | None = None
        self._reload: AnyFunction | None = None
        self._unload: AnyFunction | None = None
        self._newest_version: AnyFunction | None = None
        self._default: AnyFunction | None = None
        self._handlers: dict[str, AnyFunction] = {}
        self._options: dict[str, dict[str, Any]] = {}
        """The options of each handler, by path: fields of its `RegisteredHandler`."""

    def with_sessions(self, sessions: SessionFactory) -> App:
        """The same hooks and handlers with another session factory."""
        other = copy(self)
        other.sessions = sessions
        return other

    def on_start(self, function: FunctionT) -> FunctionT:
        """Run `function(context)` once, after the session is built and before any request.

        Its result becomes `context.state`. If it raises, the start of the worker fails, and callers receive the reason.
        """
        if self._start is not None:
            raise ConfigurationError("This App already has an on_start function; call one from the other.")
        self._start = _checked_hook("on_start", function)
        return function

    def on_stop(self, function: FunctionT) -> FunctionT:
        """Run `function(context)` once, after the last request and before the session is closed."""
        if self._stop is not None:
            raise ConfigurationError("This App already has an on_stop function; call one from the other.")
        self._stop = _checked_hook("on_stop", function)
        return function

    def on_reload(self, function: FunctionT) -> FunctionT:
        """Run `function(context)` to load the data again; without it, `on_start` is run again.

        `context.state` is the state that is in use, `context.session` a new copy of its session, in which views may be
        replaced, and `context.data_version` the version to load (None if unknown). The result is the new
        `context.state`. Meanwhile requests are answered from the former state, and they continue to be if it raises:
        requests that need the new version then get the error.
        """
        if self._reload is not None:
            raise ConfigurationError("This App already has an on_reload function; call one from the other.")
        self._reload = _checked_hook("on_reload", function)
        return function

    def on_unload(self, function: FunctionT) -> FunctionT:
        """Run `function(context)` once for each context that a reload has replaced, after its last request."""
        if self._unload is not None:
            raise ConfigurationError("This App already has an on_unload function; call one from the other.")
        self._unload = _checked_hook("on_unload", function)
        return function

    def newest_version(self, function: FunctionT) -> FunctionT:
        """Call `function(context)` to find the version of the data that a load would read now, as an integer that
        never decreases; None: unknown.

        The worker calls it before it loads the data, before each request that needs a version, and otherwise at most
        once a second when a request arrives. If the version is later than that of `context`, the worker reloads.
        `context.state` is None before the first load.
        """
        if self._newest_version is not None:
            raise ConfigurationError("This App already has a newest_version function; call one from the other.")
        self._newest_version = _checked_hook("newest_version", function)
        return function

    def handler(
        self,
        path: str,
        *,
        abandonable: bool = False,
        coalesce: bool | Callable[[Call], bool | None] | None = None,
        row_limit: int | None = None,
    ) -> Callable[[FunctionT], FunctionT]:
        """Answer requests whose `x-rpc-path` is exactly `path`.

        With `abandonable`, a cancelled call that continues (Spark's analysis cannot be cancelled) does not block
        others: the next request runs beside it, even if `concurrency` is 1. If the handler returns a DataFrame or
        table, the answer contains its first `row_limit` rows, and is marked as `truncated` if there are more. The
        default is 10,000 rows, and no limit if the caller asks for a stream.

        With `coalesce`, requests with the same body and the same `accept` that are in the worker at the same time are
        answered by one call: only for handlers whose answer depends on nothing else in the request. The call is that of
        one of them, and is cancelled when no caller needs the answer. Requests for streamed answers run by themselves.
        With None, requests share a call if their route has `coalesce: true`; with False, never. A function of the call
        may return one of the three: it runs on the event loop for each request, and must be fast.
        """
        _check_path("handler", path)
        return self._register(path, abandonable=abandonable, coalesce=coalesce, row_limit=row_limit)

    def batch_handler(
        self, path: str, *, max_size: int = 256, max_wait: float | str = "20ms", row_limit: int | None = None
    ) -> Callable[[FunctionT], FunctionT]:
        """Answer many requests whose `x-rpc-path` is exactly `path` in one call of the function.

        The function takes `(calls: list[Call])` or `(calls: list[Call], requests: list[T])` and returns a list with an
        answer, or an exception, for each of them. The calls have the same key and priority level, and there are at most
        `max_size`; the first of them waits at most `max_wait` (seconds, or text such as `"20ms"`) for the others. Each
        call has its own deadline, cancel and retry. If the function raises, the runtime tries each half of the calls
        separately, until it finds the faulty call: the function must be safe to repeat.
        """
        _check_path("batch_handler", path)
        if not 1 <= max_size <= MAX_BATCH_SIZE:
            raise ConfigurationError(
                f"The max_size of the batch handler of {path!r} is {max_size}; use 1 to {MAX_BATCH_SIZE:,}."
            )
        batch = BatchOptions(max_size, _batch_wait(path, max_wait))
        return self._register(path, row_limit=row_limit, batch=batch)

    def _register(self, path: str, *, row_limit: int | None, **options: Any) -> Callable[[FunctionT], FunctionT]:
        if row_limit is not None and row_limit < 0:
            raise ConfigurationError(f"The row_limit of the handler of {path!r} is {row_limit}; use 0 or more.")
        if path in self._handlers:
            raise ConfigurationError(f"The path {path!r} has two handlers; give one of them another path.")

        def register(function: FunctionT) -> FunctionT:
            self._handlers[path] = function
            limits = {} if row_limit is None else {"row_limit": row_limit, "stream_limit": row_limit}
            self._options[path] = {**limits, **options}
            return function

        return register

    def default_handler(self, function: FunctionT) -> FunctionT:
        """Answer requests whose path has no handler (`call.path`), or that have no path."""
        if self._default is not None:
            raise ConfigurationError("This App already has a default handler; an App has at most one.")
        self._default = function
        return function

    @property
    def start_hook(self) -> AnyFunction | None:
        return self._start

    @property
    def stop_hook(self) -> AnyFunction | None:
        return self._stop

    @property
    def reload_hook(self) -> AnyFunction | None:
        return self._reload or self._start

    @property
    def unload_hook(self) -> AnyFunction | None:
        return self._unload

    @property
    def newest_version_hook(self) -> AnyFunction | None:
        return self._newest_version

    def registered_handlers(self) -> Mapping[str, RegisteredHandler]:
        """The handlers by path. Raises `ConfigurationError` for an invalid signature."""
        return MappingProxyType(
            {path: _registered(path, function, **self._options[path]) for path, function in self._handlers.items()}
        )

    def registered_default_handler(self) -> RegisteredHandler | None:
        """The handler of all other paths. Raises `ConfigurationError` for an invalid signature."""
        return None if self._default is None else _registered("*", self._default)


def _check_path(decorator: str, path: object) -> None:
    """Refuse `@app.handler` without a path, which would register nothing and replace the function by a decorator."""
    if isinstance(path, str):
        return
    name = getattr(path, "__name__", "path")
    raise ConfigurationError(f"@app.{decorator} needs the path of its requests: write @app.{decorator}('/{name}').")


def _checked_hook(hook: str, function: AnyFunction) -> AnyFunction:
    """A hook that can be called with a `Context`. Raises `ConfigurationError` for other parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no function, or one of C without a signature: the call will show
        return function
    try:
        signature.bind(None)
    except TypeError:
        raise ConfigurationError(f"The {hook} function {_name(function)} must take (context).") from None
    return function


def _name(function: AnyFunction) -> str:
    return getattr(function, "__qualname__", repr(function))


def _batch_wait(path: str, given: float | str) -> float:
    """`max_wait` in seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", given) if isinstance(given, str) else None
    seconds = float(found[1]) / (1000 if found[2] == "ms" else 1) if found else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_BATCH_WAIT:
        raise ConfigurationError(
            f"The max_wait of the batch handler of {path!r} is {given!r}; use a time such as '20ms', from 0 to "
            f"{MAX_BATCH_WAIT:.0f} s."
        )
    return float(seconds)


def is_poolable(sessions: SessionFactory) -> TypeGuard[PoolableSessions]:
    return all(callable(getattr(sessions, name, None)) for name in ("build_shared", "for_key", "heap"))


def _registered(path: str, function: AnyFunction, **options: Any) -> RegisteredHandler:
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    if not parameters or len(required) > 2:
        takes = "(call) or (call, request)" if options.get("batch") is None else "(calls) or (calls, requests)"
        raise ConfigurationError(f"The handler {_name(function)} of {path!r} must take {takes}.")
    takes_request = len(parameters) > 1
    where = f"{_name(function)} of {path!r}"
    request_type = _request_type(function, parameters[1].name, where=where) if takes_request else None
    if takes_request and options.get("batch") is not None:
        request_type = _element_type(request_type, where=where)
    return RegisteredHandler(
        path=path,
        function=function,
        is_async=inspect.iscoroutinefunction(function),
        takes_request=takes_request,
        request_type=request_type,
        **options,
    )


def _request_type(function: AnyFunction, parameter: str, *, where: str) -> Any:
    """The annotation of the request parameter; without one `Any`, the decoded JSON value."""
    try:
        return get_type_hints(function, include_extras=True).get(parameter, Any)
    except Exception as error:  # annotations are code of the application
        raise ConfigurationError(
            f"The request type of the handler {where} cannot be found ({error}); define it at the top of its module."
        ) from error


def _element_type(annotation: Any, *, where: str) -> Any:
    """`T` of the annotation `list[T]`; `Any` without an annotation, for `list` and for `typing.List`."""
    if annotation is Any or annotation is list:
        return Any
    if get_origin(annotation) is not list:
        raise ConfigurationError(f"The requests of the batch handler {where} must be a list, such as list[Request].")
    return next(iter(get_args(annotation)), Any)

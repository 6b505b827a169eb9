"""Start and stop an application: import it, build its session, run its hooks, and reload its data.

Hooks and session factories may block: they run in threads, and the event loop keeps sending heartbeats.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from osrdyne.errors import ConfigurationError
from osrdyne.logs import get_logger
from osrdyne.protocol.data_versions import check_data_version
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne_worker.app.app import AnyFunction, App, Context
from osrdyne_worker.app.coroutines import RunCoroutine, run_here
from osrdyne_worker.app.errors import describe_with_place
from osrdyne_worker.runtime.loop_watchdog import on_loop
from osrdyne_worker.runtime.start_times import StartTimes

log = get_logger("worker")


def import_app(reference: str) -> App:
    """Import the `App` that `module:attribute` names, from the working directory or an installed package.

    Raises `ConfigurationError`.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(
            f"The application must be given as module:attribute, not {reference!r}{_hint(module_name, attribute)}."
        )
    if "/" in module_name or module_name.startswith("."):
        raise ConfigurationError(f"{module_name!r} is no module but a path{_hint(module_name, attribute)}.")
    here = str(Path.cwd())
    if here not in sys.path:
        # As `python -m` would: an application in the working directory needs no installation.
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"There is no module {error.name!r}, neither installed nor in the working directory {here}"
                f"{_hint(module_name, attribute)}."
            ) from error
        raise ConfigurationError(
            f"The module {module_name!r} cannot be imported: {describe_with_place(error)}"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigurationError(f"The module {module_name!r} has no {attribute!r}.")
    app = getattr(module, attribute)
    if not isinstance(app, App):
        raise ConfigurationError(f"{reference} is not an osrdyne_worker.App; it is {type(app).__name__}.")
    return app


def _hint(module_name: str, attribute: str) -> str:
    """The remedy if the path of a file was given instead of a module; empty otherwise."""
    if not ("/" in module_name or module_name.startswith(".") or module_name.endswith(".py")):
        return ""
    name = Path(module_name).name.removesuffix(".py").lstrip(".") or "my_module"
    return f": write {name}:{attribute or 'app'} in the directory of {name}.py"


def checked_config(app: App, worker_config: Mapping[str, object]) -> dict[str, Any]:
    """Return the application's own part of a `WORKER_CONFIG` document, checked by the application.

    Raises `ConfigurationError` that names the invalid fields.
    """
    config = worker_config.get("app", {})
    if not isinstance(config, dict):
        raise ConfigurationError("WORKER_CONFIG.app must be a JSON object.")
    if app.check_config is not None:
        try:
            app.check_config(config)
        except ConfigurationError:
            raise
        except ValidationError as error:
            raise ConfigurationError(f"worker.config is invalid: {_problems(error)}.") from None
        except Exception as error:
            raise ConfigurationError(f"worker.config is invalid: {describe_with_place(error)}") from error
    return config


def _problems(error: ValidationError) -> str:
    """Each invalid field with its path, and without its value, which may be a secret."""
    return "; ".join(
        f"{'.'.join(['worker.config', *(str(step) for step in problem['loc'])])}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)
    )


def first_context(app: App, environment: WorkerEnvironment) -> Context:
    """The context before anything is loaded. Raises `ConfigurationError` for an invalid `WORKER_CONFIG`."""
    config = checked_config(app, environment.config)
    return Context(
        key=environment.key,
        pool=environment.pool,
        worker_id=environment.worker_id,
        config=config,
        worker_config=environment.config,
    )


class Loader:
    """Starts and stops one application. `context` holds what is loaded so far. `run_coroutine` runs hooks."""

    def __init__(
        self,
        app: App,
        context: Context,
        threads: ThreadPoolExecutor,
        times: StartTimes | None = None,
        *,
        run_coroutine: RunCoroutine = run_here,
    ) -> None:
        self._app = app
        self._threads = threads
        self._run_coroutine = run_coroutine
        self._times = times or StartTimes()
        self.context = context
        self._session: Any = None
        """The session that the factory has built, which is closed in the end. Reloads use copies of it."""
        self._session_built = False
        self._reloads = 0
        self._left_checks: set[asyncio.Future[Any]] = set()
        """Checks of the newest version that run on in their threads, although no request waits for them any more."""

    async def start(self) -> Context:
        """Build the session and run `on_start`. Raises what they raise."""
        if self._app.sessions is not None:
            with self._times.part("session"):
                session = await self._in_thread(self._app.sessions.build, self.context)
            # The factory may measure parts of "session", which the worker reports by their own names.
            for part, seconds in getattr(self._app.sessions, "start_times", dict)().items():
                self._times.note(part, seconds)
            # Before `on_start`, which may use the session; and known to `stop` even if the hook fails.
            self.context = replace(self.context, session=session)
            self._session, self._session_built = session, True
        # Before the data is read: data that is written meanwhile has a later version.
        self.context = replace(self.context, data_version=await self.newest_version())
        if self._app.start_hook is not None:
            with self._times.part("load"):
                self.context = replace(self.context, state=await self._call_start_hook(self._app.start_hook))
        return self.context

    @property
    def waiting_for(self) -> str | None:
        """What the session factory waits for, such as executors of a cluster; None if unknown."""
        return getattr(self._app.sessions, "waiting_for", None)

    @property
    def names_versions(self) -> bool:
        return self._app.newest_version_hook is not None

    async def newest_version(self) -> int | None:
        """The version of the data that a load would read now; None if unknown. Raises what the application raises."""
        hook = self._app.newest_version_hook
        version = None if hook is None else await self._check(hook)
        return None if version is None else check_data_version(version)

    async def _check(self, hook: AnyFunction) -> Any:
        """Like `_call`, but one check at a time: if checks hang, for example in a file system, they must not occupy all
        threads of the worker."""
        if inspect.iscoroutinefunction(hook):
            return await self._run_coroutine(on_loop(hook, self.context, context=self.context))
        if self._left_checks:
            await asyncio.wait(self._left_checks)
        check = asyncio.ensure_future(self._in_thread(hook, self.context))
        try:
            return await asyncio.shield(check)
        except asyncio.CancelledError:
            self._left_checks.add(check)
            check.add_done_callback(self._forget_check)
            raise

    def _forget_check(self, check: asyncio.Future[Any]) -> None:
        self._left_checks.discard(check)
        if not check.cancelled():
            check.exception()  # asyncio must not report it: no request waits for the check

    async def reload(self, version: int | None) -> Context:
        """Run `on_reload`, or `on_start` again, with a copy of the session; return the new context. Raises what they
        raise."""
        hook, former = self._app.reload_hook, self.context
        new = replace(former, data_version=version)
        if hook is not None:
            self._reloads += 1
            if self._app.sessions is not None:
                # A copy: requests that still run must not see one view of the new data beside one of the former.
                # Optional methods: the factory of an application may have only those of `SessionFactory`.
                copy = getattr(self._app.sessions, "session_for_load", self._app.sessions.request_session)
                new = replace(new, session=await self._in_thread(copy, former.session))
            group = f"{new.worker_id}-reload-{self._reloads}"
            # Before the hook, or its frames would find the data that the former load has cached of the same paths.
            # Requests with the former data read their files meanwhile.
            await self._begin_load(new.session, group)
            new = replace(new, state=await self._call_in_group(hook, new, group))
            await self._begin_load(new.session, group)
        self.context = new
        return new

    async def _begin_load(self, session: Any, load: str) -> None:
        begin = getattr(self._app.sessions, "begin_load", None)
        if begin is not None:
            await self._in_thread(lambda given: begin(given, load), session)

    async def unload(self, context: Context) -> None:
        """Run `on_unload` for a context that no request uses any more; a failure is logged."""
        if self._app.unload_hook is None:
            return
        try:
            await self._call(self._app.unload_hook, context)
        except Exception:
            log.exception("on_unload failed")

    async def stop(self, *, started: bool) -> None:
        """Run `on_stop` if the start succeeded, and close the session; failures are logged."""
        if started and self._app.stop_hook is not None:
            try:
                await self._call(self._app.stop_hook, self.context)
            except Exception:
                log.exception("on_stop failed")
        if self._app.sessions is not None and self._session_built:
            try:
                await self._in_thread(self._app.sessions.close, self._session)
            except Exception:
                log.exception("session could not be closed")

    async def _call(self, hook: AnyFunction, context: Context) -> Any:
        if inspect.iscoroutinefunction(hook):
            return await self._run_coroutine(on_loop(hook, context, context=context))
        return await self._in_thread(hook, context)

    async def _call_start_hook(self, hook: AnyFunction) -> Any:
        # If other keys share the heap, the heap watch must be able to cancel this load. Otherwise it would cancel
        # requests of other keys.
        if getattr(self._app.sessions, "shares_heap", False):
            return await self._call_in_group(hook, self.context, f"{self.context.worker_id}-start")
        return await self._call(hook, self.context)

    async def _call_in_group(self, hook: AnyFunction, context: Context, group: str) -> Any:
        """Like `_call`, with the jobs of a plain function in a group: in a pooled process they run in the scheduler
        pool of their key, and the heap watch can cancel them."""
        sessions = self._app.sessions
        if sessions is None or inspect.iscoroutinefunction(hook):
            return await self._call(hook, context)
        # Optional: the factory of an application may have only the methods of `SessionFactory`.
        run = getattr(sessions, "load_in_group", sessions.run_in_group)
        return await self._in_thread(lambda given: run(given.session, group, lambda: hook(given)), context)

    async def _in_thread(self, function: AnyFunction, argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _call, function, argument)


def _call(function: AnyFunction, argument: Any) -> Any:
    try:
        return function(argument)
    except (SystemExit, StopIteration) as error:
        # A future cannot carry StopIteration, and SystemExit would end the event loop.
        name = getattr(function, "__qualname__", "The function")
        raise RuntimeError(f"{name} ended with {type(error).__name__}: {error}") from error

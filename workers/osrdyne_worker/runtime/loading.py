"""Start and stop an application: import it, build its session, run its hooks. Each once in the life of a worker.

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
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne_worker.app.app import AnyFunction, App, Context
from osrdyne_worker.app.errors import describe_with_place
from osrdyne_worker.runtime.start_times import StartTimes

log = get_logger("worker")


def import_app(reference: str) -> App:
    """Import the `App` that `module:attribute` names, from the working directory or an installed package.

    Raises `ConfigurationError`.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(f"The application must be given as module:attribute, not {reference!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        # As `python -m` would: an application in the working directory needs no installation.
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"There is no module {error.name!r}, neither installed nor in the working directory {here}."
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


def checked_config(app: App, worker_config: Mapping[str, object]) -> dict[str, Any]:
    """The application's own part of a `WORKER_CONFIG` document, after the application has looked at it.

    Raises `ConfigurationError` that names what is wrong.
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
    """Starts and stops one application. `context` holds what is loaded so far."""

    def __init__(
        self, app: App, context: Context, threads: ThreadPoolExecutor, times: StartTimes | None = None
    ) -> None:
        self._app = app
        self._threads = threads
        self._times = times or StartTimes()
        self.context = context
        self._session_built = False

    async def start(self) -> Context:
        """Build the session and run `on_start`. Raises what they raise."""
        if self._app.sessions is not None:
            with self._times.part("session"):
                session = await self._in_thread(self._app.sessions.build, self.context)
            # Of the parts of "session" that the factory measures, the worker reports each by its own name.
            for part, seconds in getattr(self._app.sessions, "start_times", dict)().items():
                self._times.note(part, seconds)
            # Before `on_start`, which may use the session; and known to `stop` even if the hook fails.
            self.context = replace(self.context, session=session)
            self._session_built = True
        if self._app.start_hook is not None:
            with self._times.part("load"):
                self.context = replace(self.context, state=await self._call(self._app.start_hook))
        return self.context

    async def stop(self, *, started: bool) -> None:
        """Run `on_stop` if the start succeeded, and close the session; failures are logged."""
        if started and self._app.stop_hook is not None:
            try:
                await self._call(self._app.stop_hook)
            except Exception:
                log.exception("on_stop failed")
        if self._app.sessions is not None and self._session_built:
            try:
                await self._in_thread(self._app.sessions.close, self.context.session)
            except Exception:
                log.exception("session could not be closed")

    async def _call(self, hook: AnyFunction) -> Any:
        if inspect.iscoroutinefunction(hook):
            return await hook(self.context)
        return await self._in_thread(hook, self.context)

    async def _in_thread(self, function: AnyFunction, argument: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _call, function, argument)


def _call(function: AnyFunction, argument: Any) -> Any:
    try:
        return function(argument)
    except (SystemExit, StopIteration) as error:
        # A future cannot carry StopIteration, and SystemExit would end the event loop.
        raise RuntimeError(f"{function.__qualname__} ended with {type(error).__name__}: {error}") from error

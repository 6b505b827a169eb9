"""The versions of the data of one worker: reload it when a request needs a later version.

A reload runs in a thread while requests are served with the former data. It is shared by all requests that it
satisfies. Used on the event loop only. Source: docs/how-to/serve-changing-data.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from osrdyne.logs import get_logger
from osrdyne_worker.app.app import Context
from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.runtime.exit import Unrecoverable
from osrdyne_worker.runtime.settings import RuntimeContext

CHECK_INTERVAL = 1.0
"""Seconds between two checks of the newest version for requests that name none."""
FAILURE_PAUSE = 10.0
"""Seconds without such a check after a reload that has failed."""
CHECK_TIMEOUT = 10.0
"""Seconds that a request waits for a check."""

log = get_logger("worker")


class DataLoading(Protocol):
    """Loads the data of the application."""

    @property
    def names_versions(self) -> bool:
        """Whether the application finds the newest version itself."""
        ...

    async def newest_version(self) -> int | None:
        """The version that a reload would find; None if unknown. Raises what the application raises."""
        ...

    async def reload(self, version: int | None) -> Context:
        """Load the data again, as `version`, and return the new context. Changes nothing if the application raises an
        error, which is passed on."""
        ...

    async def unload(self, context: Context) -> None:
        """Release former data, which no request uses any more. Never raises."""
        ...


@dataclass(slots=True, eq=False)
class LoadedData:
    """The data of one load, and how many requests use it. `version`: None if unknown."""

    context: Context
    version: int | None = None
    uses: int = 0


@dataclass(slots=True, eq=False)
class Reload:
    """A reload that runs. It satisfies requests that came before it began, and those of versions up to `target`."""

    number: int
    target: int | None
    forget: bool
    done: asyncio.Future[None] = field(repr=False)


class DataVersions:
    """The current data of a worker. `loading` None: it cannot be reloaded, and has all versions."""

    def __init__(self, context: Context, loading: DataLoading | None, runtime: RuntimeContext) -> None:
        self._loading = loading
        self._runtime = runtime
        self._clock = runtime.clock
        self._current = LoadedData(context)
        self._running: Reload | None = None
        self._begun = 0
        self._wanted: int | None = None
        """The highest version that a request needs whose reload has not begun."""
        self._forget = False
        self._checked_at = -CHECK_INTERVAL

    @property
    def context(self) -> Context:
        return self._current.context

    @property
    def version(self) -> int | None:
        """The version of the current data; None if unknown."""
        return self._current.version

    def loaded(self, context: Context) -> None:
        """Set the context with which the worker has started."""
        self._current = LoadedData(context, context.data_version)

    def use(self) -> LoadedData:
        """Return the current data, for a request that begins to run."""
        self._current.uses += 1
        return self._current

    def release(self, data: LoadedData) -> None:
        """Note that a request that used `data` has left the worker."""
        data.uses -= 1
        self._unload_unused(data)

    def has(self, required: int | None) -> bool:
        """Whether a request that has just arrived, and needs the version `required`, may run without `prepare`."""
        if self._loading is None:
            return True
        if self._loading.names_versions:
            return required is None and self._clock.monotonic() - self._checked_at < CHECK_INTERVAL
        return required is None or (self.version is not None and self.version >= required)

    async def prepare(self, required: int | None, *, on_reload: Callable[[], None] = lambda: None) -> None:
        """Wait until such a request may run. Calls `on_reload` before it waits for a reload.

        Raises `RequestError` if the data has no such version, and what a reload raises.
        """
        if self._loading is None:
            return
        newest = await self._newest(self._loading, required) if self._loading.names_versions else None
        if newest is not None:
            # The source of the data names its versions: the number of a client causes no reload.
            if self.version is None or newest > self.version:
                on_reload()
                await self._join_or_use_former(newest, required)
            if required is not None and self.version is not None and self.version < required:
                raise RequestError(
                    f"The request needs version {required} of the data; the newest version is {self.version}.",
                    503,
                    "data_version_unavailable",
                    {"version": self.version},
                )
        elif required is not None and (self.version is None or self.version < required):
            on_reload()
            await self._join(required)

    async def reload(self, *, unless: LoadedData | None = None, forget: bool = False) -> None:
        """Load the data again, in a reload that begins now or later; raises what the application raises.

        `unless`: no reload if the current data is not this one any more. `forget`: drop the versions that requests have
        named, so that the next request that names one reloads the data.
        """
        if unless is not None and self._current is unless and self._running is not None:
            # All requests that find that the same data has changed share one reload.
            await asyncio.shield(self._running.done)
        if unless is None or self._current is unless:
            self._forget = self._forget or forget
            await self._join(None)

    async def _newest(self, loading: DataLoading, required: int | None) -> int | None:
        """Return the newest version; None if unknown."""
        # Before the check: requests that arrive meanwhile use the current data.
        self._checked_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                return await loading.newest_version()
        except Exception as error:
            log.warning("newest version of the data unknown", reason=type(error).__name__, exc_info=error)
            # The data may be older than the version that the request needs.
            if required is not None:
                raise
            return None

    async def _join_or_use_former(self, newest: int, required: int | None) -> None:
        try:
            await self._join(newest)
        except Exception:
            if required is not None:
                raise
            # The request names no version, so the former data answers it. The next check comes later.
            self._checked_at = self._clock.monotonic() + FAILURE_PAUSE

    async def _join(self, version: int | None) -> None:
        """Wait for a reload that begins after this call, or that loads `version` or a later one."""
        if version is not None:
            self._wanted = version if self._wanted is None else max(self._wanted, version)
        earlier = self._begun
        while True:
            running = self._running or self._begin()
            named = version is not None and running.target is not None and running.target >= version
            if running.number > earlier or named:
                # Shielded: if this request is cancelled, the reload continues for the others.
                await asyncio.shield(running.done)
                return
            await asyncio.wait({running.done})

    def _begin(self) -> Reload:
        self._begun += 1
        done = asyncio.get_running_loop().create_future()
        # `_run` logs the error: asyncio must not report it if no request waits for it any more.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        reload = self._running = Reload(self._begun, self._wanted, self._forget, done)
        self._wanted, self._forget = None, False
        self._runtime.spawn(self._run(reload))
        return reload

    async def _run(self, reload: Reload) -> None:
        loading, since = self._loading, self._clock.monotonic()
        assert loading is not None
        limit = self._runtime.settings.processing_timeout
        # A thread cannot be ended from outside, and requests that need the version would wait without end.
        stuck = asyncio.get_running_loop().call_later(
            limit, self._runtime.request_exit, Unrecoverable(f"The reload of the data did not end within {limit:g} s.")
        )
        try:
            # Before the data is read: data that is written meanwhile has a later version, and is loaded next time.
            version = await loading.newest_version()
            if version is None and not reload.forget:
                known = [one for one in (reload.target, self.version) if one is not None]
                version = max(known, default=None)
            context = await loading.reload(version)
            former, self._current = self._current, LoadedData(context, version)
        except Exception as error:
            # Requests that need no later version are answered from the former data.
            log.error("data not reloaded", reason=type(error).__name__, exc_info=error)
            self._running = None
            reload.done.set_exception(error)
        else:
            log.info("data reloaded", version=version, seconds=round(self._clock.monotonic() - since, 3))
            self._running = None
            reload.done.set_result(None)
            self._unload_unused(former)
        finally:
            stuck.cancel()
            if not reload.done.done():
                reload.done.cancel()  # the worker ends

    def _unload_unused(self, data: LoadedData) -> None:
        if data.uses == 0 and data is not self._current and self._loading is not None:
            self._runtime.spawn(self._loading.unload(data.context))

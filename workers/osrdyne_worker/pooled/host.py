"""The objects that the workers of a pooled process share: the application, the shared session, and a few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from osrdyne.aio.clock import Clock
from osrdyne.errors import ConfigurationError
from osrdyne.logs import get_logger
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.pooled import ProcessMemory
from osrdyne_worker.app.app import App, PoolableSessions, is_poolable
from osrdyne_worker.pooled.assigned_worker import AssignedWorker
from osrdyne_worker.pooled.memory import memory_limit, process_memory
from osrdyne_worker.requests.scheduling.suspects import SuspectGate
from osrdyne_worker.runtime.loading import first_context

SIDE_THREADS = 8
"""The number of threads for short calls about sessions, shared by all workers. A worker makes two such calls every five
seconds."""
SESSION_GONE = "The session of this process is gone."

T = TypeVar("T")

log = get_logger("pooled")


def check_poolable(app: App) -> None:
    """Raise `ConfigurationError` if the application is not suitable for workers of several keys in one process."""
    if not app.poolable:
        raise ConfigurationError(
            "The application is not poolable: its workers need a process for each key (worker.placement: dedicated). "
            "If it keeps all data of a key in context.session and context.state, set App(poolable=True)."
        )


class WorkerHost:
    """Creates the workers. Raises `ConfigurationError` if the application is not poolable."""

    def __init__(self, app: App, environment: WorkerEnvironment, clock: Clock) -> None:
        check_poolable(app)
        self._app = app
        self._context = first_context(app, environment)
        self._clock = clock
        self._sessions: PoolableSessions | None = (
            app.sessions if app.sessions is not None and is_poolable(app.sessions) else None
        )
        self._shared: Any = None
        self._suspect_gate = SuspectGate()
        self._side_threads = ThreadPoolExecutor(SIDE_THREADS, thread_name_prefix="side")

    async def start(self) -> None:
        """Build the shared session. Raises the errors of the session factory."""
        if (sessions := self._sessions) is not None:
            self._shared = await self._in_thread(lambda: sessions.build_shared(self._context))

    def start_times(self) -> Mapping[str, float]:
        """Seconds that the parts of `start` took, as far as the session factory measures them."""
        measured: Mapping[str, float] = getattr(self._sessions, "start_times", dict)()
        return measured

    def make_worker(self, environment: WorkerEnvironment) -> AssignedWorker:
        """A new worker, which does not run yet. Call it only after `start`."""
        return AssignedWorker(
            self._app,
            environment,
            sessions=None if self._sessions is None else self._sessions.for_key(self._shared),
            side_threads=self._side_threads,
            suspect_gate=self._suspect_gate,
            clock=self._clock,
        )

    async def loss(self) -> str | None:
        """Why the shared session is lost; None while it is alive."""
        if (sessions := self._sessions) is None:
            return None
        try:
            if await self._in_thread(lambda: sessions.is_alive(self._shared)):
                return None
            find: Callable[[Any], str | None] | None = getattr(sessions, "loss_reason", None)
            reason = None if find is None else await self._in_thread(lambda: find(self._shared))
        except Exception:
            log.warning("session health check failed", exc_info=True)
            return SESSION_GONE
        return f"{SESSION_GONE} {reason}" if reason else SESSION_GONE

    async def memory(self) -> ProcessMemory:
        """The memory of this process, its children, the heap of the shared session, and the host or cgroup."""
        rss, pss = await self._in_thread(process_memory)
        limit = await self._in_thread(memory_limit)
        used, maximum, live = None, None, None
        if (sessions := self._sessions) is not None and self._shared is not None:
            used, maximum = await self._in_thread(lambda: sessions.heap(self._shared)) or (None, None)
            find: Callable[[Any], int | None] | None = getattr(sessions, "live_heap", None)
            live = None if find is None else find(self._shared)
        return ProcessMemory(heap_used=used, heap_max=maximum, rss=rss, pss=pss, heap_live=live, limit=limit)

    async def executor_seconds(self) -> float | None:
        """How long tasks of all keys have run, in seconds on one core; None if unknown."""
        find: Callable[[Any], float | None] | None = getattr(self._sessions, "executor_seconds", None)
        return None if find is None or self._shared is None else await self._in_thread(lambda: find(self._shared))

    async def close(self) -> None:
        """Close the shared session; this ends Spark's JVM."""
        if (sessions := self._sessions) is not None and self._shared is not None:
            await self._in_thread(lambda: sessions.close(self._shared))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._side_threads, function)

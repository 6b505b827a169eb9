"""One worker of a pooled process: a `Worker` with its own session, threads and connection.

Its end is reported once its connection is closed, because RabbitMQ has then requeued its requests. Threads that do not
end are counted; its session is closed once they have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from osrdyne.aio.clock import Clock
from osrdyne.errors import ConfigurationError
from osrdyne.logs import get_logger
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.pooled import AssignmentExit
from osrdyne_worker.app.app import App, Context, KeySessions, SessionFactory
from osrdyne_worker.app.errors import describe_with_place
from osrdyne_worker.bootstrap import WorkerParts, build_parts
from osrdyne_worker.pooled.handler_loop import HandlerLoop
from osrdyne_worker.pooled.log_lines import bind_worker
from osrdyne_worker.requests.scheduling.suspects import SuspectGate
from osrdyne_worker.runtime.exit import ExitCode, ExitReason, LoopBlocked, Stop
from osrdyne_worker.runtime.loop_watchdog import Blocked
from osrdyne_worker.runtime.start_times import StartTimes
from osrdyne_worker.worker import Worker

TIDY_INTERVAL = 1.0
"""Seconds between two checks whether the threads of an ended worker have ended too."""

P = ParamSpec("P")
T = TypeVar("T")

log = get_logger("pooled")


class _WorkerExitedError(Exception):
    """Ends `Worker.run` at the point where a dedicated worker would end its process."""


class KeyThreads(ThreadPoolExecutor):
    """The threads of one key. `running`: how many of them are busy."""

    def __init__(self, count: int, *, enter: Callable[[], None]) -> None:
        super().__init__(count, thread_name_prefix="handler", initializer=enter)
        self._unfinished: set[Future[Any]] = set()

    @property
    def running(self) -> int:
        return len(self._unfinished)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future


class _OwnSession:
    """The session factory of a key. It stores the session, which must be closed after its last thread has ended."""

    def __init__(self, sessions: KeySessions) -> None:
        self._sessions = sessions
        self._built: list[Any] = []
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sessions, name)

    def build(self, context: Context) -> Any:
        session = self._sessions.build(context)
        self._built.append(session)
        return session

    def close(self, session: Any) -> None:
        self._sessions.close(session)
        self._closed = True

    def close_last(self, *, filled_since: bool) -> None:
        """Close the session if it is open, or again if threads may have added data to it since."""
        for session in self._built if filled_since or not self._closed else ():
            self._sessions.close(session)


class AssignedWorker:
    """One worker. `run` returns the worker's exit; `request_exit` and `cut_off` end the worker.

    `sessions`: the session factory of its key. `side_threads` and `suspect_gate` are shared by all workers of
    the process: threads for short calls, and a gate for suspects.
    """

    def __init__(
        self,
        app: App,
        environment: WorkerEnvironment,
        *,
        sessions: KeySessions | None,
        side_threads: ThreadPoolExecutor,
        suspect_gate: SuspectGate,
        clock: Clock,
    ) -> None:
        self._app = app
        self._environment = environment
        self._sessions = None if sessions is None else _OwnSession(sessions)
        self._enter_thread: Callable[[], None] | None = None if sessions is None else sessions.enter_thread
        self.side_threads = side_threads
        self.suspect_gate = suspect_gate
        self._clock = clock
        self._threads: KeyThreads | None = None
        self._process_loop = asyncio.get_running_loop()
        self._coroutines = HandlerLoop(enter=self._enter, on_blocked=self._blocked)
        self._parts: WorkerParts | None = None
        self._worker: Worker | None = None
        self._reason: ExitReason | None = None
        self._failure = AssignmentExit(ExitCode.UNRECOVERABLE, "the worker runtime failed unexpectedly")
        """The exit of the worker if it reports none itself."""
        self._ended: asyncio.Future[AssignmentExit] = asyncio.get_running_loop().create_future()
        self._life: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None

    async def run(self) -> AssignmentExit:
        """Work until the worker exits or is cut off. A task of this object then waits for its remaining threads."""
        self._life = asyncio.create_task(self._live(), name=f"worker {self._environment.worker_id}")
        how = await asyncio.shield(self._ended)
        if self._threads is not None:
            # Never waited for: a handler that hangs would keep the worker from ever being reported as exited.
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._tidying = asyncio.create_task(self._tidy(), name=f"tidy {self._environment.worker_id}")
        return how

    def request_exit(self, reason: ExitReason) -> None:
        """Make the worker finish or requeue its requests and exit; see `Worker.request_exit`."""
        if self._worker is None:
            self._reason = reason
        else:
            self._worker.request_exit(reason)

    def report_blocked(self, blocked: Blocked) -> None:
        if self._worker is not None:
            self._worker.report_blocked(blocked)

    async def cut_off(self, reason: str) -> None:
        """End the worker at once. Its connection is closed, so RabbitMQ requeues its requests, even those that still
        run here.

        A request in a thread that cannot be interrupted continues; its answer is dropped.
        """
        self._failure = AssignmentExit(ExitCode.UNRECOVERABLE, reason)
        if self._life is not None:
            # Before the connection is closed: the worker must not open another one.
            self._life.cancel()
        if self._worker is not None:
            await self._worker.disconnect()
        self._end(self._failure)

    @property
    def in_flight(self) -> int:
        return 0 if self._parts is None or self._ended.done() else self._parts.reporter.in_flight

    @property
    def last_used(self) -> float:
        """The time of its last request, in seconds since the epoch; 0 before it has loaded its application."""
        return 0.0 if self._parts is None else self._parts.reporter.last_used

    @property
    def requests(self) -> int:
        """How many requests it has completed."""
        return 0 if self._parts is None else self._parts.reporter.completed_requests

    @property
    def left_behind(self) -> int:
        """The number of threads that still run although the worker has ended."""
        if self._threads is None or not self._ended.done():
            return 0
        return self._threads.running + min(self._coroutines.running, 1)

    def handler_threads(self, count: int) -> ThreadPoolExecutor:
        """Make the threads for the handlers of this worker. Called by `build_parts`."""
        self._threads = KeyThreads(count, enter=self._enter)
        return self._threads

    async def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine of a handler or a hook on the event loop of this key."""
        assert self._parts is not None
        return await self._coroutines.run(coroutine, blocked_timeout=self._parts.settings.blocked_timeout)

    def _blocked(self, blocked: Blocked) -> None:
        """End this worker, and no other. Called by the thread of the watchdog, which has logged the cause."""
        if self._worker is not None and self._worker.is_loading:
            return  # no fault: loading may take long, and has a limit of its own
        with suppress(RuntimeError):  # the process has ended its loop meanwhile
            reason = LoopBlocked(blocked.reason, blocked.text)
            self._process_loop.call_soon_threadsafe(self.request_exit, reason)

    def _enter(self) -> None:
        bind_worker(self._environment.worker_id, self._environment.key)
        if self._enter_thread is not None:
            self._enter_thread()

    async def _live(self) -> None:
        bind_worker(self._environment.worker_id, self._environment.key)
        try:
            # In a thread: pydantic compiles the request types of all handlers, which takes long.
            loop = asyncio.get_running_loop()
            self._parts = await loop.run_in_executor(self.side_threads, self._build)
            self._worker = Worker(self._parts)
            # The release came while the worker was being built.
            if self._reason is not None:
                self._worker.request_exit(self._reason)
            await self._worker.run(self._exit)
        except ConfigurationError as error:
            log.error("worker cannot be built", reason=error.message)
            self._end(AssignmentExit(ExitCode.INVALID_CONFIGURATION, error.message))
        except BaseExceptionGroup as errors:
            if not self._ended.done():
                log.error("worker runtime failed", exc_info=errors)
        except Exception as error:
            log.exception("worker cannot be built")
            self._failure = AssignmentExit(ExitCode.UNRECOVERABLE, describe_with_place(error))
        finally:
            # Its tasks are cancelled, which closes its connection.
            self._end(self._failure)

    def _build(self) -> WorkerParts:
        app = self._app
        if self._sessions is not None:
            app = app.with_sessions(cast(SessionFactory, self._sessions))
        # The modules are already imported: "python" is the time to prepare the handlers.
        times = StartTimes()
        with times.part("python"):
            return build_parts(app, self._environment, clock=self._clock, host=self, start_times=times)

    def _exit(self, reason: ExitReason) -> NoReturn:
        """Called by the worker after it has closed its connection."""
        if isinstance(reason, Stop):
            log.info("worker stopped")
            self._end(AssignmentExit(ExitCode.STOPPED))
        else:
            log.error("worker failed", reason=reason.reason, exit_code=int(reason.code))
            self._end(AssignmentExit(reason.code, reason.reason))
        # Ends `Worker.run`: a dedicated worker ends its process here.
        raise _WorkerExitedError

    def _end(self, how: AssignmentExit) -> None:
        """Record how the worker has ended. The first end counts: a cut-off and an exit may come together."""
        if not self._ended.done():
            self._ended.set_result(how)

    async def _tidy(self) -> None:
        """Close the session once no thread of the key runs: a running thread may still add data to it."""
        filled_since = self.left_behind > 0
        while self.left_behind:
            await self._clock.sleep(TIDY_INTERVAL)
        if (sessions := self._sessions) is not None:
            loop = asyncio.get_running_loop()
            try:
                # Last: views that a thread creates after this would remain in the shared Spark.
                close = partial(sessions.close_last, filled_since=filled_since)
                await loop.run_in_executor(self.side_threads, close)
            except Exception:
                log.exception("session could not be closed")
        self._coroutines.close()

"""Builds the parts of a worker from its environment and its application."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import PoolNames, ReplyAddresses
from osrdyne_worker.app.app import App, Context
from osrdyne_worker.app.coroutines import run_here
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.processor import Answering, Processor
from osrdyne_worker.requests.replies import ReplySender
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.requests.scheduling.suspects import RefusedTexts, SuspectGate
from osrdyne_worker.runtime.loading import Loader, first_context
from osrdyne_worker.runtime.ready_file import NO_READY_FILE, ReadyFile
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeContext, RuntimeSettings, runtime_settings
from osrdyne_worker.runtime.start_times import StartTimes


class SharedProcess(Protocol):
    """The resources of a worker that shares its process with others."""

    side_threads: ThreadPoolExecutor
    suspect_gate: SuspectGate

    def handler_threads(self, count: int) -> ThreadPoolExecutor:
        """Make the threads for the handlers of this worker."""
        ...

    async def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine of a handler or hook where it can block no other worker."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker that live as long as it does. `owns_process`: it is alone in its process."""

    environment: WorkerEnvironment
    settings: RuntimeSettings
    clock: Clock
    ready_file: ReadyFile
    loader: Loader
    dispatcher: Dispatcher
    reporter: Reporter
    start_times: StartTimes
    owns_process: bool = True
    suspect_gate: SuspectGate | None = None

    def make_processor(self, runtime: RuntimeContext, context: Context, *, on_alone: Callable[[], None]) -> Processor:
        """Make the processor. Needs a running event loop."""
        environment = self.environment
        return Processor(
            runtime,
            context,
            dispatcher=self.dispatcher,
            reporter=self.reporter,
            answering=Answering(
                addresses=ReplyAddresses(PoolNames(environment.pool), self.settings.reply_to_prefixes),
                replies=ReplySender(
                    environment.worker_id,
                    environment.max_message_bytes,
                    self.clock,
                    reference_statuses=self.settings.statuses == "reference",
                ),
                retries=Retries(environment.retry_exchange),
            ),
            refused_texts=RefusedTexts(self.clock, environment.poison),
            suspect_gate=self.suspect_gate,
            on_alone=on_alone,
            loading=self.loader,
            rate=environment.rate,
        )


def build_parts(
    app: App,
    environment: WorkerEnvironment,
    *,
    ready_file: ReadyFile = NO_READY_FILE,
    clock: Clock | None = None,
    host: SharedProcess | None = None,
    start_times: StartTimes | None = None,
) -> WorkerParts:
    """Build the parts, for a worker that is alone in its process or for one of `host`'s.

    Raises `ConfigurationError` if the environment or the application is invalid.
    """
    clock = clock or SystemClock()
    settings = runtime_settings(environment.config)
    start_times = start_times or StartTimes()
    # One thread for each request that runs, cancelled or not, one for a reload and one for checks of the newest version
    # of the data; and two for questions about requests. Loading uses the first.
    count = settings.concurrency + settings.max_abandoned + 2
    if host is None:
        threads = ThreadPoolExecutor(count, thread_name_prefix="handler")
        side_threads = ThreadPoolExecutor(2, thread_name_prefix="side")
    else:
        threads, side_threads = host.handler_threads(count), host.side_threads
    return WorkerParts(
        environment=environment,
        settings=settings,
        clock=clock,
        ready_file=ready_file,
        loader=Loader(
            app,
            first_context(app, environment),
            threads,
            start_times,
            run_coroutine=run_here if host is None else host.run_coroutine,
        ),
        dispatcher=Dispatcher(
            app,
            threads=threads,
            side_threads=side_threads,
            run_coroutine=run_here if host is None else host.run_coroutine,
            debug=settings.debug,
        ),
        reporter=Reporter(
            key=environment.key,
            worker_id=environment.worker_id,
            exchange=environment.activity_exchange,
            clock=clock,
        ),
        owns_process=host is None,
        suspect_gate=None if host is None else host.suspect_gate,
        start_times=start_times,
    )

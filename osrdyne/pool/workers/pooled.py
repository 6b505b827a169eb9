"""The part of a leader's term that serves pooled workers: the link over RabbitMQ to their processes, and the tasks that
run during the term.

The pooled driver outlives the term. `PooledTerm` gives it a link at the beginning of the term and removes the link at
the end. The activity processor passes the reports of the processes to the driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from osrdyne.config.models import Settings
from osrdyne.drivers.base import WorkerSpec, new_worker_id
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.pooled.placement import ProcessSettings
from osrdyne.drivers.pooled.upkeep import PooledUpkeep
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Lease, WorkerCredentials
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerState
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.protocol.environment import Placement, WorkerEnvironment
from osrdyne.protocol.names import PoolNames, WorkerId
from osrdyne.protocol.pooled import PROCESS_KEY, Question


class PooledLink:
    """Implements `ProcessLink`: questions are control messages, and each process has its own credentials."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        control: WorkerControl,
        credentials: WorkerCredentials,
        lease: Lease,
        worker_reports: WorkerRegistry,
    ) -> None:
        self._settings = context.settings
        self._metrics = context.metrics
        self._tracker = tracker
        self._control = control
        self._credentials = credentials
        self._lease = lease
        self._worker_reports = worker_reports

    @property
    def term(self) -> int:
        return self._tracker.generation.term

    async def send(self, process: WorkerId, question: Question) -> bool:
        return await self._control.ask_process(process, question)

    async def confirm(self, *, since: float | None = None) -> None:
        await self._lease.confirm(since=since)

    async def make_process(self, slot: int, settings: ProcessSettings) -> WorkerSpec:
        environment = process_environment(self._settings, settings.config)
        # If the leader dies before the process starts, a user without a process remains; the next leader removes it.
        uri = await self._credentials.uri_for_process(environment.worker_id)
        return WorkerSpec(
            environment=replace(environment, amqp_uri=uri),
            generation=self._tracker.generation,
            slot=slot,
            spec_hash=settings.hash,
        )

    def release_process(self, process: WorkerId) -> None:
        self._credentials.release(process)

    def runs_suspect(self, worker_id: WorkerId) -> bool:
        reported = self._worker_reports[worker_id]
        return reported is not None and reported.alone is not None

    def loads(self, worker_id: WorkerId) -> bool:
        reported = self._worker_reports[worker_id]
        return reported is not None and reported.state is WorkerState.LOADING

    def note_assigned(self, seconds: float) -> None:
        self._metrics.assign_seconds.observe(seconds)


def process_environment(settings: Settings, config: Mapping[str, object] | None = None) -> WorkerEnvironment:
    """The environment of a new process, with a new worker id and without request queues. `config`: its worker
    configuration; None: that of the pool."""
    names = PoolNames(settings.pool.id)
    return WorkerEnvironment(
        worker_id=new_worker_id(),
        key=PROCESS_KEY,
        pool=names.pool,
        amqp_uri=settings.broker.effective_worker_uri(),
        requests_queues=(),
        activity_exchange=names.activity_exchange,
        control_exchange=names.control_exchange,
        max_message_bytes=settings.requests.max_message_bytes,
        config=settings.worker_config() if config is None else config,
        placement=Placement.POOLED,
    )


class PooledTerm:
    """The pooled workers during one term."""

    def __init__(self, driver: PooledDriver, link: PooledLink) -> None:
        self.driver = driver
        self.upkeep = PooledUpkeep(driver)
        self._link = link

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[None]:
        """Give the driver its link during the term."""
        self.driver.begin_term(self._link)
        try:
            yield
        finally:
            self.driver.end_term()

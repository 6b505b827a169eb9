"""One leader's term: runs what the wiring has built, from the token to its loss.

The order is lifecycle: token-before-listing, prepare-then-consume: first the token, then infrastructure and listings of
queues, bindings and instances, then the loops, and only then the consumers. An orderly end uses the reverse order:
first the consumers and the messages that they have taken, then the loops. Workers continue to run, unless the operator
stops them too. The daemon decides what follows a term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.aio.tasks import start_endless
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.daemon.wiring import Resources, wire_term
from osrdyne.errors import BrokerError, ManagementUnavailableError
from osrdyne.logs import Logger, get_logger

T = TypeVar("T")
PREPARE_RETRY = Backoff(initial=0.5, maximum=10.0)
REPORTS_AT_ONCE = 8  # How many groups a new leader asks for reports at the same time.


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The request to end a term in order; `stop_workers`: end the workers too."""

    requested: asyncio.Event
    stop_workers: bool = False


class _Patience:
    """Repeats a step of the preparation while RabbitMQ's HTTP API does not answer.

    With thousands of queues it may be slow for minutes. The next leader would wait for the same answers: this one keeps
    the token and what it has loaded.
    """

    def __init__(
        self, stop: StopRequest, clock: Clock, on_delay: Callable[[ManagementUnavailableError], None], log: Logger
    ) -> None:
        self._stop = stop
        self._clock = clock
        self._on_delay = on_delay
        self._log = log

    async def until_answered(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the step. Raises the last error if the daemon is to stop."""
        failures = 0
        while True:
            try:
                return await step()
            except ManagementUnavailableError as error:
                failures += 1
                self._log.warning("the term waits for RabbitMQ's HTTP API", error=str(error), failures=failures)
                self._on_delay(error)
                await self._pause(PREPARE_RETRY.delay(failures))
                if self._stop.requested.is_set():
                    raise

    async def _pause(self, seconds: float) -> None:
        waits = {
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(self._stop.requested.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class Term:
    """The leader's work, from token to loss of token."""

    def __init__(self, resources: Resources) -> None:
        self._wiring = wiring = wire_term(resources)
        self._session = resources.session
        self._open_pool = resources.open_pool
        self._clock = resources.context.clock
        self._token = resources.token
        self.names = resources.session.names
        self.since = resources.context.clock.time()
        self.state = wiring.state
        self.queues = wiring.queues
        self.workers = wiring.workers
        self.routing = wiring.routing
        self.groups = wiring.groups
        self.processors = wiring.processors
        self._log: Logger = get_logger("term", pool=self.names.pool, term=resources.token.term)

    @property
    def is_blocked(self) -> bool:
        """Whether RabbitMQ accepts no messages of the leader, because of a memory or disk alarm."""
        return self._session.is_blocked

    async def run(
        self,
        stop: StopRequest,
        *,
        on_leading: Callable[[], None],
        on_delay: Callable[[ManagementUnavailableError], None] = lambda _: None,
    ) -> None:
        """Lead until `stop`, then end in order; raises when leadership is lost. `on_delay` is called while RabbitMQ's
        HTTP API keeps this daemon from leading."""
        async with self._linked(), asyncio.TaskGroup() as group:
            # First of all: the token is renewed while the term is prepared, however long that takes.
            session = start_endless(group, "leader session", self._session.run(self._token))
            await self._prepare(group, _Patience(stop, self._clock, on_delay, self._log))
            # Before the consumers: an orphan that arrives needs the loops that bind its queue and start its worker.
            loops = self._start_loops(group)
            await self.processors.consumers.start(group)
            loops.append(group.create_task(self._ask_workers_for_reports(), name="reports of workers"))
            on_leading()
            self._log.info(
                "leading", groups=len(self.state.tracker.keys()), workers=len(self.state.instances.entries())
            )
            await stop.requested.wait()
            self._log.info("stopping")
            # Consumers first, loops then: a request that was taken may still wait for its queue to be bound.
            await self.processors.consumers.finish()
            for task in loops:
                task.cancel()
            await asyncio.wait(loops)  # otherwise a worker that is just being started could be missed
            await self.routing.quotas.save()  # after the last request was counted
            await self.routing.circuits.step()
            if stop.stop_workers:
                await self._stop_workers()
            # Last: until here every command needs the token.
            session.cancel()

    def _linked(self) -> AbstractAsyncContextManager[None]:
        """Connect the driver of pooled workers to its processes during the term."""
        return nullcontext() if self.workers.pooled is None else self.workers.pooled.linked()

    async def _prepare(self, group: asyncio.TaskGroup, patience: _Patience) -> None:
        """Declare infrastructure, then list what exists already (lifecycle: prepare-then-consume).

        Each step may be repeated: it changes nothing before it has its answers, or changes the same again.
        """
        for key in await patience.until_answered(self._open_pool):
            self.state.tracker.pin(key)
        await self._session.declare(pool_topology(self.names.pool))
        # Before the seed: the routes say which priority levels the queues of a group have.
        # The alternate exchange of the work exchanges exists by now (lifecycle: prepare-then-consume).
        await patience.until_answered(self.routing.routes.load)
        await patience.until_answered(self.routing.splitter.load)
        # Before the consumers: a message is published to streams that exist.
        await patience.until_answered(self.routing.log.load)
        await patience.until_answered(self.routing.policies.load)
        # Before requests are taken and workers are started: both depend on it.
        await self.routing.worker_principal.load()
        # Before requests are taken: what they use up is added to what the earlier leader has counted.
        await patience.until_answered(self.routing.quotas.load)
        await patience.until_answered(self.routing.circuits.load)
        # Before instances are listed: the profiles say which of them have other settings than their group.
        await patience.until_answered(self.routing.profiles.load)
        # Before the consumers: requests for a queue that is being removed are answered `gone`.
        await patience.until_answered(self.routing.lifetimes.load)
        await patience.until_answered(lambda: self._wiring.apply_policies(self.routing.routes.longest_ttl))
        await patience.until_answered(self.groups.resync.seed)
        if self.workers.pooled is not None:
            # Only the processes can list their workers, and they answer through the activity queue. The groups are
            # seeded by now, so that reports of workers that arrive meanwhile are not dropped.
            await self.processors.consumers.start_early(group, self.names.activity_queue)
        # Before anything is planned: an unlisted worker would be started a second time.
        await self.workers.loop.list_instances()
        # After the first listing of workers: it shows which groups were found without a worker.
        self.groups.resync.retire_unused(self.state.worker_status)

    def _start_loops(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        loops = {
            "topology watch": self.routing.topology.run(),
            "routes": self.routing.routes.run(),
            "splitter": self.routing.splitter.run(),
            "profiles": self.routing.profiles.run(),
            "policies": self.routing.policies.run(),
            "principal of the workers": self.routing.worker_principal.run(),
            "quotas": self.routing.quotas.run(),
            "rates of workers": self.routing.rates.run(),
            "counts of quotas": self.routing.quotas.run_saving(),
            "configuration of circuits": self.routing.circuits.run(),
            "circuits": self.routing.circuits.work(),
            "pool state tracker": self.state.tracker.run(),
            "request queues loop": self.queues.loop.run(),
            "worker groups loop": self.workers.loop.run(),
            "worker credentials": self.workers.credentials.run(),
            "queue depths": self.queues.depths.run(),
            "autoscaler": self.workers.autoscaler.run(),
            "start failure responder": self.processors.start_failures.run(),
            "queue lifetimes": self.routing.lifetimes.run(),
            "delivery limits": self.queues.limits.run(),
            "removal responder": self.processors.removals.run(),
            "copies of poison": self.processors.drops.run(),
            "audit": self.processors.audit.run(),
            "idle groups": self.groups.idle.run(),
            "eviction": self.groups.eviction.run(),
            "unused queues": self.routing.unused_levels.run(),
            "resync": self.groups.resync.run(),
            "worker liveness": self.groups.liveness.run(),
        }
        if self.groups.reattached is not None:
            loops["reattached workers"] = self.groups.reattached.run()
        if self.workers.pooled is not None:
            loops["pooled processes"] = self.workers.pooled.upkeep.run()
            loops["memory of processes"] = self.groups.memory.run()
        log = self.routing.log.log
        if self._wiring.resources.measures_lag and log.name is not None:
            loops["lag of telemetry"] = self.routing.log_inspector.run(log.name, log.partitions)
            if self.routing.scheduler is not None and log.partitions:
                loops["ingests of telemetry"] = self.routing.scheduler.run(log.name, log.partitions)
        return [start_endless(group, name, loop) for name, loop in loops.items()]

    async def _ask_workers_for_reports(self) -> None:
        """Workers found at the start have reported to an earlier leader: ask what state they are in (defects:
        ready-after-restart).

        Only a few at once: each publish takes a channel, and with thousands of groups the publishes for new keys would
        wait.
        """
        instances = self.state.instances.entries()
        found = [*self.state.tracker.keys(), *(entry.instance.key for entry in instances)]
        left = iter(dict.fromkeys(found))

        async def ask() -> None:
            # One iterator shared by all tasks: each key is asked once.
            for key in left:
                await self.workers.control.ask_for_reports(key)

        async with asyncio.TaskGroup() as group:
            for _ in range(REPORTS_AT_ONCE):
                group.create_task(ask(), name="reports of workers")

    async def _stop_workers(self) -> None:
        """End every worker of the pool; their queues stay, with what is in them."""
        if self.workers.pooled is not None:
            # The processes, and with them their workers: reports, which confirm the end of a single worker, are not
            # consumed any more.
            await self.workers.pooled.upkeep.stop_all()
        await self.workers.actions.stop_all()
        with suppress(BrokerError):  # a later leader removes what is left
            await self.workers.credentials.tidy()

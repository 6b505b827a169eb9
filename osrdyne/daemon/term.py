"""One term: everything a leader builds after it got the token, runs while it holds it, and forgets when it loses it.

The order is lifecycle: token-before-listing, prepare-then-consume: first the token, then infrastructure, listings of
queues, bindings and instances, then the
loops, and only then the consumers. A graceful end goes the other way round: consumers first, then what they have
taken, then the loops; workers go on running unless the operator asked otherwise. Built by the daemon, which also
decides what comes after it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from osrdyne.aio.clock import Clock
from osrdyne.aio.supervise import start_endless
from osrdyne.broker.leadership.token import Token
from osrdyne.broker.management.apply import apply_policies
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.listings import RequestQueueListing
from osrdyne.broker.session import LeaderSession
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.broker.topology.policies import PolicySpec, pool_policy
from osrdyne.config.models import Settings
from osrdyne.drivers.base import Driver, InstanceState
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.oversight import Oversight
from osrdyne.pool.queues.depths import FreshTotals
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.queues.topology_watch import KeptParameter, TopologyWatch
from osrdyne.pool.routing.active_manifest import ManifestInForce
from osrdyne.pool.routing.backlog import ClassBacklog
from osrdyne.pool.routing.build import build_routing
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.pool.routing.priorities import UnusedStores
from osrdyne.pool.routing.splitter import SplitterInForce
from osrdyne.pool.state.admission import Admission, KeyCensus
from osrdyne.pool.state.crashes import DeathRegister, PoisonTexts
from osrdyne.pool.state.groups import Delays
from osrdyne.pool.state.instances import InstanceBook
from osrdyne.pool.state.observed import QueueBoard, WorkerBoard
from osrdyne.pool.state.restart_backoff import StartRecords
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.pool.state.worker_reports import WorkerRegistry
from osrdyne.pool.workers.actions import WorkerActions
from osrdyne.pool.workers.autoscaler import WorkerScaler
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.loop import WorkerGroupsLoop
from osrdyne.pool.workers.specs import choose_credentials, group_limits, scaling_rules, spec_factory
from osrdyne.processors import activity
from osrdyne.processors.consumers import ControllerConsumers, Processor
from osrdyne.processors.failures import dead_letters
from osrdyne.processors.failures.start_failures import StartFailureResponder
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.poison.evidence import EvidenceCollector
from osrdyne.processors.poison.inventory import PoisonInventory
from osrdyne.processors.prefetch import first_prefetch
from osrdyne.processors.replies import Replier
from osrdyne.processors.requests import cancellations
from osrdyne.processors.requests.kept_cancels import KeptCancels
from osrdyne.processors.requests.orphan_queue import build_orphan_processor
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.reply_addresses import ReplyAddresses


@dataclass(frozen=True, slots=True)
class StopRequest:
    """How the daemon asks a term to end in order; `stop_workers` also ends the workers."""

    requested: asyncio.Event
    stop_workers: bool = False


class Term:
    """The leader's work, from token to loss of token."""

    def __init__(
        self,
        settings: Settings,
        *,
        session: LeaderSession,
        token: Token,
        driver: Driver,
        management: ManagementClient,
        pinned: list[Key],
        parameters: Sequence[KeptParameter] = (),
        census: KeyCensus,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._session = session
        self._token = token
        self._driver = driver
        self._management = management
        self._clock = clock
        self._metrics = metrics
        self.names = session.names
        self.since = clock.time()
        lifecycle = settings.lifecycle
        self.tracker = PoolStateTracker(
            term=token.term,
            delays=Delays(unbind=lifecycle.unbind_delay, stop=lifecycle.stop_delay),
            clock=clock,
            pinned=pinned,
        )
        # A driver that starts nothing fills no host: only the number of keys is limited then.
        self.admission = Admission(
            max_groups=lifecycle.max_groups if driver.manages_workers else math.inf,
            max_waiting=lifecycle.max_waiting_groups,
            census=census,
        )
        self.queue_board = QueueBoard()
        self.worker_board = WorkerBoard()
        self.registry = WorkerRegistry(clock)
        self.deaths = DeathRegister()
        self._poison_texts = PoisonTexts(clock, seconds=settings.requests.poison_time)
        self.book = InstanceBook()
        self._layout = QueueLayout(self.names, managed=settings.pool.is_managed)
        self.backlog = ClassBacklog(since=clock.monotonic() if self._layout.managed else None)
        self._credentials = choose_credentials(
            settings,
            layout=self._layout,
            management=management,
            driver=driver,
            alive=self._workers_alive,
            clock=clock,
        )
        self._commands = session.request_queues(management, self._layout)
        self._control = WorkerControl(names=self.names, tracker=self.tracker, publisher=session.publisher)
        self._build_loops()
        self._build_routing()
        self._build_topology_watch(parameters)
        self._build_processors()
        self._log: Logger = get_logger("term", pool=settings.pool.id, term=token.term)

    # --- building

    def _workers_alive(self) -> set[WorkerId]:
        instances = (entry.instance for entry in self.book.entries())
        return {instance.worker_id for instance in instances if instance.state is not InstanceState.EXITED}

    def _build_loops(self) -> None:
        lifecycle, clock, metrics = self._settings.lifecycle, self._clock, self._metrics
        self.limits = group_limits(self._settings)
        listing = RequestQueueListing(self._management, self.names, self._layout)
        self._totals = FreshTotals(listing, clock=clock)
        self.queues_loop = RequestQueuesLoop(
            tracker=self.tracker,
            queues=self._commands,
            board=self.queue_board,
            workers=self.worker_board,
            totals=self._totals,
            settle_delay=lifecycle.settle_delay,
            clock=clock,
            metrics=metrics,
        )
        records = StartRecords()
        self._actions = WorkerActions(
            driver=self._driver,
            make_spec=spec_factory(self._settings, self._layout, self._credentials, self._poison_texts),
            credentials=self._credentials,
            book=self.book,
            records=records,
            tracker=self.tracker,
            queues=self._commands,
            registry=self.registry,
            control=self._control,
            deaths=self.deaths,
            poison=self._poison_texts,
            lease=self._session.token,
            limits=self.limits,
            clock=clock,
            metrics=metrics,
        )
        rules = scaling_rules(self._settings, self._driver)
        self._scaler = WorkerScaler(
            rules, book=self.book, registry=self.registry, backlogs=listing, clock=clock, metrics=metrics
        )
        self.groups_loop = WorkerGroupsLoop(
            tracker=self.tracker,
            driver=self._driver,
            actions=self._actions,
            book=self.book,
            records=records,
            queue_board=self.queue_board,
            board=self.worker_board,
            registry=self.registry,
            admission=self.admission,
            scaler=self._scaler,
            limits=self.limits,
            clock=clock,
            metrics=metrics,
        )
        self._build_oversight(listing)

    def _build_routing(self) -> None:
        self.routing = build_routing(
            self._settings,
            session=self._session,
            management=self._management,
            layout=self._layout,
            board=self.queue_board,
            registry=self.registry,
            queues=self.queues_loop,
            control=self._control,
            count_ready=self._commands.count_ready,
            keep_for=self._apply_policy,
            clock=self._clock,
            metrics=self._metrics,
        )
        self.splitting = SplitterInForce(
            self._management, pool=self.names.pool, managed=self._layout.managed, clock=self._clock
        )
        self.manifests: Mapping[ManifestKind, ManifestInForce[Any]] = {
            ManifestKind.ROUTES: self.routing,
            ManifestKind.SPLITTER: self.splitting,
        }

    def _build_topology_watch(self, parameters: Sequence[KeptParameter]) -> None:
        self.topology = TopologyWatch(
            names=self.names,
            expected=self.routing.expected_topology,
            policy=lambda: self._policy(self.routing.longest_ttl),
            parameters=[*parameters, *self.manifests.values()],
            management=self._management,
            declare=self._session.declare,
            declare_waits=self.routing.declare_waits,
            doubt_bindings=self.queues_loop.doubt_all,
            lease=self._session.token,
            interval=self._settings.lifecycle.topology_interval,
            clock=self._clock,
            metrics=self._metrics,
        )

    def _build_oversight(self, listing: RequestQueueListing) -> None:
        self._oversight = Oversight(
            self._settings,
            tracker=self.tracker,
            admission=self.admission,
            queue_board=self.queue_board,
            worker_board=self.worker_board,
            registry=self.registry,
            book=self.book,
            listing=listing,
            totals=self._totals,
            commands=self._commands,
            control=self._control,
            queues_loop=self.queues_loop,
            groups_loop=self.groups_loop,
            unused_stores=UnusedStores(
                layout=self._layout,
                board=self.queue_board,
                totals=listing,
                control=self._control,
                look_at=self.queues_loop.look_at,
                settle_delay=self._settings.lifecycle.settle_delay,
                clock=self._clock,
            ),
            on_listing=self.backlog.take_listing,
            clock=self._clock,
            metrics=self._metrics,
        )

    def _build_processors(self) -> None:
        names, clock, metrics = self.names, self._clock, self._metrics
        publisher, kept_cancels = self._session.publisher, KeptCancels(clock)
        addresses = ReplyAddresses(names, self._settings.requests.reply_to_prefixes)
        forgeries = Forgeries(addresses, metrics=metrics, clock=clock)
        replier = Replier(
            publisher,
            forgeries=forgeries,
            clock=clock,
            metrics=metrics,
            reference_statuses=self._settings.requests.statuses == "reference",
        )
        self._orphans = build_orphan_processor(
            self._settings,
            session=self._session,
            management=self._management,
            layout=self._layout,
            tracker=self.tracker,
            board=self.queue_board,
            admission=self.admission,
            doubt=self.queues_loop.doubt,
            backlog=self.backlog,
            routing=self.routing,
            splitting=self.splitting,
            count_ready=self._commands.count_ready,
            cancels=kept_cancels,
            replier=replier,
            forgeries=forgeries,
            clock=clock,
            metrics=metrics,
        )
        self._dead_letters = dead_letters.DeadLetterResponder(
            names=names,
            publisher=publisher,
            replier=replier,
            forgeries=forgeries,
            workers=self.worker_board,
            evidence=EvidenceCollector(registry=self.registry, deaths=self.deaths, clock=clock),
            poison_texts=self._poison_texts,
            delivery_limit=self._settings.requests.delivery_limit,
            on_inventory_missing=self.topology.check_soon,
            max_message_bytes=self._settings.requests.max_message_bytes,
            clock=clock,
            metrics=metrics,
        )
        self.poison = PoisonInventory(
            names=names,
            publisher=publisher,
            open_channel=self._session.channel,
            forgeries=forgeries,
            clock=clock,
        )
        self._cancels = cancellations.CancelProcessor(
            names=names,
            tracker=self.tracker,
            routing=self.routing,
            splitting=self.splitting,
            kept=kept_cancels,
            publisher=publisher,
            forgeries=forgeries,
            metrics=metrics,
        )
        self._activity = activity.ActivityProcessor(
            names=names,
            forgeries=forgeries,
            tracker=self.tracker,
            board=self.queue_board,
            registry=self.registry,
            on_report=self._cancels.heard_of,
            on_retried=self.routing.note_retried,
            window=self._settings.lifecycle.extra_lifetime,
            clock=clock,
            metrics=metrics,
        )
        self._start_failures = StartFailureResponder(
            layout=self._layout,
            board=self.worker_board,
            queues=self.queue_board,
            replier=replier,
            open_channel=self._session.channel,
            retry=self.groups_loop.retry,
            clock=clock,
        )
        self._consumers = self._build_consumers()

    def _build_consumers(self) -> ControllerConsumers:
        """Orphans last: whatever they set in motion, reports and dead letters of it are heard."""
        names, bounded = self.names, first_prefetch(self._settings.requests.max_message_bytes)
        processors = [
            Processor(names.activity_queue, activity.PREFETCH, self._activity.run),
            Processor(names.dead_letter_queue, bounded, self._dead_letters.run),
            Processor(names.cancel_queue, cancellations.PREFETCH, self._cancels.run),
            Processor(names.orphan_queue, bounded, self._orphans.run),
        ]
        return ControllerConsumers(processors, open_channel=self._session.channel)

    # --- running

    async def run(self, stop: StopRequest, *, on_leading: Callable[[], None]) -> None:
        """Lead until `stop`, then end in order; raises when leadership is lost."""
        async with asyncio.TaskGroup() as group:
            keeping = start_endless(group, "leader session", self._session.run(self._token))
            await self._prepare()
            loops = self._start_loops(group)
            await self._consumers.start(group)
            await self._ask_workers_for_reports()
            on_leading()
            self._log.info("leading", groups=len(self.tracker.keys()), workers=len(self.book.entries()))
            await stop.requested.wait()
            self._log.info("stopping")
            await self._consumers.finish()
            for task in loops:
                task.cancel()
            await asyncio.wait(loops)  # or a worker that is just being started could be missed
            if stop.stop_workers:
                await self._stop_workers()
            keeping.cancel()

    async def _prepare(self) -> None:
        """Infrastructure, then what there is already (lifecycle: prepare-then-consume)."""
        await self._session.declare(pool_topology(self.names.pool))
        await self.routing.load()
        await self.splitting.load()
        await self._apply_policy(self.routing.longest_ttl)
        await self._oversight.resync.seed()
        await self.groups_loop.list_instances()
        self._oversight.retire_unused()

    async def _apply_policy(self, longest_ttl: float) -> None:
        """Put the policy of the request queues on the broker; `longest_ttl` in seconds is the longest of the routes."""
        await apply_policies(self._management, self._policy(longest_ttl))

    def _policy(self, longest_ttl: float) -> PolicySpec:
        return pool_policy(self._settings, self._session.version, longest_ttl=longest_ttl)

    def _start_loops(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [
            start_endless(group, "topology watch", self.topology.run()),
            start_endless(group, "routes", self.routing.run()),
            start_endless(group, "splitter", self.splitting.run()),
            start_endless(group, "pool state tracker", self.tracker.run()),
            start_endless(group, "request queues loop", self.queues_loop.run()),
            start_endless(group, "worker groups loop", self.groups_loop.run()),
            start_endless(group, "worker credentials", self._credentials.run()),
            start_endless(group, "fresh totals", self._totals.run()),
            start_endless(group, "worker scaler", self._scaler.run()),
            start_endless(group, "start failure responder", self._start_failures.run()),
            *self._oversight.start(group),
        ]

    async def _ask_workers_for_reports(self) -> None:
        """Workers found at the start have reported to an earlier leader: ask what state they are in (defects:
        ready-after-restart)."""
        keys = {*self.tracker.keys(), *(entry.instance.key for entry in self.book.entries())}
        await asyncio.gather(*(self._control.ask_for_reports(key) for key in keys))

    async def _stop_workers(self) -> None:
        """End every worker of the pool; their queues stay, with what is in them."""
        await self._actions.stop_all()
        with suppress(BrokerError):  # a later leader removes what is left
            await self._credentials.tidy()

"""The composition root of a leader's term: builds every object, one function for each subsystem.

Each function takes what the subsystems below it have built; `wire_term` is the order. Nothing here decides or runs
anything: `daemon.term` runs what is built, in the order of the lifecycle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osrdyne.broker.leadership.token import Token
from osrdyne.broker.management.apply import apply_policies
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import ScopedCredentials, SharedCredentials
from osrdyne.broker.management.listings import RequestQueueListing
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.session import LeaderSession
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.broker.topology.policies import PolicySpec, pool_policy
from osrdyne.drivers.base import Driver
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.pool.context import TermContext, TermState
from osrdyne.pool.groups.eviction import GroupEviction
from osrdyne.pool.groups.idle import IdleReaper
from osrdyne.pool.groups.memory import MemoryRelief
from osrdyne.pool.queues.depths import QueueDepths
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.queues.resync import Resync
from osrdyne.pool.queues.topology_watch import KeptParameter, TopologyWatch
from osrdyne.pool.routing.active_manifest import ActiveManifest, ActiveSplitter
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.pool.routing.priorities import PriorityLevels, UnusedLevels
from osrdyne.pool.routing.retries import RetryQueuesLoop
from osrdyne.pool.routing.routes import ActiveRoutes, RouteStore
from osrdyne.pool.state.admission import Admission, KeyCounter
from osrdyne.pool.state.backlog import PriorityBacklog
from osrdyne.pool.state.crashes import DeathRegister, PoisonTexts
from osrdyne.pool.state.groups import Delays
from osrdyne.pool.state.instances import InstanceInventory
from osrdyne.pool.state.observed import QueueStatuses, WorkerStatuses
from osrdyne.pool.state.restart_backoff import RestartBackoffs
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.pool.state.worker_reports import WorkerRegistry
from osrdyne.pool.workers.actions import WorkerActions
from osrdyne.pool.workers.autoscaler import Autoscaler
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.liveness import WorkerLiveness
from osrdyne.pool.workers.loop import WorkerGroupsLoop
from osrdyne.pool.workers.pooled import PooledLink, PooledTerm
from osrdyne.pool.workers.specs import choose_credentials, scaling_rules, spec_factory
from osrdyne.processors import activity
from osrdyne.processors.consumers import ControllerConsumers, Processor
from osrdyne.processors.expiry.sweeper import ExpirySweeper
from osrdyne.processors.failures.dead_letters import DeadLetterResponder
from osrdyne.processors.failures.start_failures import StartFailureResponder
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.poison.evidence import EvidenceCollector
from osrdyne.processors.poison.inventory import PoisonInventory
from osrdyne.processors.prefetch import first_prefetch
from osrdyne.processors.publish_order import PublishOrder
from osrdyne.processors.replies import Replier
from osrdyne.processors.requests.cancellations import PREFETCH as CANCEL_PREFETCH
from osrdyne.processors.requests.cancellations import CancelProcessor, KeptCancels
from osrdyne.processors.requests.delivery import Forwarder, Router
from osrdyne.processors.requests.ingress import IngressRouter
from osrdyne.processors.requests.orphans import DirectRouter
from osrdyne.protocol.names import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the daemon gives to a term: what its components share, its connections, and what outlives it.

    `parameters`: global parameters of RabbitMQ that the topology watch keeps. `key_counter`: all keys that the pool has
    seen.
    """

    context: TermContext
    session: LeaderSession
    token: Token
    driver: Driver
    management: ManagementClient
    pinned: Sequence[Key]
    parameters: Sequence[KeptParameter] = ()
    key_counter: KeyCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """The request queues: commands on them, listings of them, and the loop that makes them as desired."""

    commands: RequestQueueCommands
    listing: RequestQueueListing
    depths: QueueDepths
    loop: RequestQueuesLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers: their credentials, the control messages to them, and the loop that starts and stops them."""

    credentials: SharedCredentials | ScopedCredentials
    control: WorkerControl
    actions: WorkerActions
    autoscaler: Autoscaler
    loop: WorkerGroupsLoop
    pooled: PooledTerm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routes and splitter of a managed pool, and the topology that they need."""

    routes: ActiveRoutes
    splitter: ActiveSplitter
    unused_levels: UnusedLevels
    topology: TopologyWatch

    @property
    def manifests(self) -> Mapping[ManifestKind, ActiveManifest[Any]]:
        return {ManifestKind.ROUTES: self.routes, ManifestKind.SPLITTER: self.splitter}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The slow loops over all groups: eviction, the end of idle groups, liveness of workers, the memory of pooled
    processes, the resync."""

    eviction: GroupEviction
    idle: IdleReaper
    liveness: WorkerLiveness
    memory: MemoryRelief
    resync: Resync


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """The consumers of the controller's queues, and what answers without a queue of its own."""

    consumers: ControllerConsumers
    forwarder: Forwarder
    poison: PoisonInventory
    start_failures: StartFailureResponder


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Every object of one term."""

    resources: Resources
    state: TermState
    queues: Queues
    workers: Workers
    routing: Routing
    groups: Groups
    processors: Processors

    async def apply_policy(self, longest_ttl: float) -> None:
        """Put the policy of the request queues on the broker; `longest_ttl` in seconds is the longest of the routes."""
        await _apply_policy(self.resources, longest_ttl)


def wire_term(resources: Resources) -> Wiring:
    """Build every object of a term. Nothing runs yet, and nothing has been sent to RabbitMQ."""
    state = wire_state(resources)
    queues = wire_queues(resources, state)
    workers = wire_workers(resources, state, queues)
    routing = wire_routing(resources, state, queues, workers)
    groups = wire_groups(resources, state, queues, workers)
    processors = wire_processors(resources, state, queues, workers, routing)
    return Wiring(
        resources=resources,
        state=state,
        queues=queues,
        workers=workers,
        routing=routing,
        groups=groups,
        processors=processors,
    )


def wire_state(resources: Resources) -> TermState:
    settings, clock = resources.context.settings, resources.context.clock
    lifecycle = settings.lifecycle
    layout = QueueLayout(resources.session.names, managed=settings.pool.is_managed)
    return TermState(
        tracker=PoolStateTracker(
            term=resources.token.term,
            delays=Delays(unbind=lifecycle.unbind_delay, stop=lifecycle.stop_delay),
            clock=clock,
            pinned=resources.pinned,
        ),
        # A driver that starts no workers fills no host: only the number of keys is limited then.
        admission=Admission(
            max_groups=_max_groups(resources),
            max_waiting=lifecycle.max_waiting_groups,
            key_counter=resources.key_counter,
        ),
        layout=layout,
        queue_status=QueueStatuses(),
        worker_status=WorkerStatuses(),
        worker_reports=WorkerRegistry(clock),
        instances=InstanceInventory(),
        restarts=RestartBackoffs(),
        crashes=DeathRegister(),
        poison_texts=PoisonTexts(clock, seconds=settings.requests.poison_time),
        backlog=PriorityBacklog(since=clock.monotonic() if layout.managed else None),
    )


def _max_groups(resources: Resources) -> float:
    """How many groups may be up: as many as the settings allow, and the processes of pooled workers have room for."""
    driver, settings = resources.driver, resources.context.settings
    if not driver.manages_workers:
        return math.inf
    room = driver.rules.capacity // settings.worker.scaling.min if isinstance(driver, PooledDriver) else math.inf
    return max(1, min(settings.lifecycle.max_groups, room))


def wire_queues(resources: Resources, state: TermState) -> Queues:
    context, session, management = resources.context, resources.session, resources.management
    commands = session.request_queues(management, state.layout)
    listing = RequestQueueListing(management, session.names, state.layout)
    depths = QueueDepths(context, listing)
    loop = RequestQueuesLoop(
        context,
        tracker=state.tracker,
        queue_commands=commands,
        queue_status=state.queue_status,
        worker_status=state.worker_status,
        depths=depths,
    )
    return Queues(commands=commands, listing=listing, depths=depths, loop=loop)


def wire_workers(resources: Resources, state: TermState, queues: Queues) -> Workers:
    context, session, driver = resources.context, resources.session, resources.driver
    pooled = driver if isinstance(driver, PooledDriver) else None
    credentials = choose_credentials(
        context,
        layout=state.layout,
        management=resources.management,
        driver=driver,
        alive=lambda: state.instances.worker_ids() | (set() if pooled is None else pooled.process_ids()),
    )
    control = WorkerControl(context, tracker=state.tracker, publisher=session.publisher)
    actions = WorkerActions(
        context,
        state,
        driver=driver,
        make_spec=spec_factory(context.settings, state.layout, credentials, state.poison_texts),
        credentials=credentials,
        queue_commands=queues.commands,
        control=control,
        lease=session.token,
    )
    autoscaler = Autoscaler(
        context,
        scaling_rules(context.settings, driver),
        instances=state.instances,
        worker_reports=state.worker_reports,
        listings=queues.listing,
    )
    loop = WorkerGroupsLoop(context, state, driver=driver, actions=actions, autoscaler=autoscaler)
    return Workers(
        credentials=credentials,
        control=control,
        actions=actions,
        autoscaler=autoscaler,
        loop=loop,
        pooled=None if pooled is None else wire_pooled(resources, state, pooled, control, credentials),
    )


def wire_pooled(
    resources: Resources,
    state: TermState,
    driver: PooledDriver,
    control: WorkerControl,
    credentials: SharedCredentials | ScopedCredentials,
) -> PooledTerm:
    """The link of the term to the processes of pooled workers, and their upkeep."""
    link = PooledLink(
        resources.context,
        tracker=state.tracker,
        control=control,
        credentials=credentials,
        lease=resources.session.token,
    )
    return PooledTerm(driver, link)


def wire_routing(resources: Resources, state: TermState, queues: Queues, workers: Workers) -> Routing:
    context, session, management = resources.context, resources.session, resources.management
    levels = PriorityLevels(
        context,
        layout=state.layout,
        queue_status=state.queue_status,
        worker_reports=state.worker_reports,
        queue_loop=queues.loop,
        control=workers.control,
    )
    routes = ActiveRoutes(
        context,
        layout=state.layout,
        levels=levels,
        retries=RetryQueuesLoop(context, session.retry_queues(management)),
        store=RouteStore(management, pool=session.names.pool),
        declare=session.declare,
        count_ready=queues.commands.count_ready,
        apply_policy=lambda longest_ttl: _apply_policy(resources, longest_ttl),
    )
    splitter = ActiveSplitter(context, management)
    unused_levels = UnusedLevels(
        context,
        layout=state.layout,
        queue_status=state.queue_status,
        listings=queues.listing,
        queue_loop=queues.loop,
        control=workers.control,
    )
    topology = TopologyWatch(
        context,
        expected=routes.expected_topology,
        policy=lambda: _policy(resources, routes.longest_ttl),
        parameters=[*resources.parameters, routes, splitter],
        management=management,
        declare=session.declare,
        declare_retry_queues=routes.declare_retry_queues,
        verify_bindings=queues.loop.verify_all,
        lease=session.token,
    )
    return Routing(routes=routes, splitter=splitter, unused_levels=unused_levels, topology=topology)


async def _apply_policy(resources: Resources, longest_ttl: float) -> None:
    await apply_policies(resources.management, _policy(resources, longest_ttl))


def _policy(resources: Resources, longest_ttl: float) -> PolicySpec:
    return pool_policy(resources.context.settings, resources.session.version, longest_ttl=longest_ttl)


def wire_groups(resources: Resources, state: TermState, queues: Queues, workers: Workers) -> Groups:
    context = resources.context
    eviction = GroupEviction(
        context,
        tracker=state.tracker,
        admission=state.admission,
        worker_status=state.worker_status,
        worker_reports=state.worker_reports,
        depths=queues.depths,
    )
    idle = IdleReaper(
        context,
        tracker=state.tracker,
        queue_status=state.queue_status,
        worker_status=state.worker_status,
        depths=queues.depths,
    )
    liveness = WorkerLiveness(
        context,
        tracker=state.tracker,
        worker_reports=state.worker_reports,
        instances=state.instances,
        control=workers.control,
        worker_loop=workers.loop,
    )
    resync = Resync(
        context,
        tracker=state.tracker,
        queue_status=state.queue_status,
        queue_loop=queues.loop,
        queue_commands=queues.commands,
        listings=queues.listing,
        on_listing=(liveness.take_listing, state.backlog.take_listing, state.worker_reports.take_listing),
    )
    memory = MemoryRelief(
        context,
        tracker=state.tracker,
        crowded=lambda: [] if workers.pooled is None else workers.pooled.driver.crowded(),
    )
    return Groups(eviction=eviction, idle=idle, liveness=liveness, memory=memory, resync=resync)


def wire_processors(
    resources: Resources, state: TermState, queues: Queues, workers: Workers, routing: Routing
) -> Processors:
    context, session = resources.context, resources.session
    names, publisher = context.names, session.publisher
    forgeries = Forgeries(context)
    replier = Replier(context, publisher=publisher, forgeries=forgeries)
    kept_cancels = KeptCancels(context.clock)
    forwarder, sweeper = wire_forwarder(resources, state, queues, routing, kept_cancels, replier, forgeries)
    dead_letters = DeadLetterResponder(
        context,
        publisher=publisher,
        replier=replier,
        forgeries=forgeries,
        worker_status=state.worker_status,
        poison_texts=state.poison_texts,
        evidence=EvidenceCollector(context, worker_reports=state.worker_reports, crashes=state.crashes),
        topology=routing.topology,
    )
    cancels = CancelProcessor(
        context,
        tracker=state.tracker,
        routing=routing.routes,
        splitting=routing.splitter,
        kept=kept_cancels,
        publisher=publisher,
        forgeries=forgeries,
    )
    reports = activity.ActivityProcessor(
        context,
        tracker=state.tracker,
        queue_status=state.queue_status,
        worker_reports=state.worker_reports,
        forgeries=forgeries,
        processes=None if workers.pooled is None else workers.pooled.driver,
        on_report=cancels.repeat_to,
        on_retried=routing.routes.note_retried,
    )
    bounded = first_prefetch(context.settings.requests.max_message_bytes)
    consumers = ControllerConsumers(
        [  # orphans last: the reports and dead letters that they cause find their consumers open
            Processor(names.activity_queue, activity.PREFETCH, reports.run),
            Processor(names.dead_letter_queue, bounded, dead_letters.run),
            Processor(names.cancel_queue, CANCEL_PREFETCH, cancels.run),
            Processor(names.orphan_queue, bounded, forwarder.run),
        ],
        open_channel=session.channel,
        sweeper=sweeper,
    )
    poison = PoisonInventory(context, publisher=publisher, open_channel=session.channel, forgeries=forgeries)
    start_failures = StartFailureResponder(
        context,
        layout=state.layout,
        worker_status=state.worker_status,
        queue_status=state.queue_status,
        replier=replier,
        open_channel=session.channel,
        worker_loop=workers.loop,
    )
    return Processors(consumers=consumers, forwarder=forwarder, poison=poison, start_failures=start_failures)


def wire_forwarder(
    resources: Resources,
    state: TermState,
    queues: Queues,
    routing: Routing,
    kept_cancels: KeptCancels,
    replier: Replier,
    forgeries: Forgeries,
) -> tuple[Forwarder, ExpirySweeper | None]:
    """The consumer of the orphan queue, with the router of the pool's kind. All requests of a managed pool come there;
    the sweeper of expired requests shares the order of its publishes."""
    context, session = resources.context, resources.session
    publish_order = PublishOrder()
    sweeper = None
    if state.layout.managed and context.settings.requests.check_entire_queue_on_cleanup:
        sweeper = ExpirySweeper(
            context,
            layout=state.layout,
            tracker=state.tracker,
            queue_status=state.queue_status,
            queue_commands=queues.commands,
            listing=queues.listing,
            routing=routing.routes,
            publish_order=publish_order,
            session=session,
        )
    router: Router = DirectRouter(context, tracker=state.tracker, forgeries=forgeries)
    if state.layout.managed:
        router = IngressRouter(
            context,
            tracker=state.tracker,
            routing=routing.routes,
            splitting=routing.splitter,
            cancels=kept_cancels,
            forgeries=forgeries,
            backlog=state.backlog,
            deadlines=None if sweeper is None else sweeper.deadlines,
        )
    forwarder = Forwarder(
        context,
        router,
        tracker=state.tracker,
        admission=state.admission,
        queue_status=state.queue_status,
        queue_loop=queues.loop,
        publish_order=publish_order,
        publisher=session.publisher,
        replier=replier,
    )
    return forwarder, sweeper

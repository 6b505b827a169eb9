"""The composition root of a leader's term: builds every object, one function for each subsystem.

Each function takes what the subsystems below it have built; `wire_term` is the order. Nothing here decides or runs
anything: `daemon.term` runs what is built, in the order of the lifecycle.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from osrdyne.broker.leadership.token import Token
from osrdyne.broker.management.apply import apply_policies
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import ScopedCredentials, SharedCredentials
from osrdyne.broker.management.listings import RequestQueueListing
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.session import LeaderSession, connection_options
from osrdyne.broker.topology.declarations import Topology
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.broker.topology.policies import PolicySpec, pool_policies
from osrdyne.config.models import Settings
from osrdyne.drivers.base import Driver
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.registry import profile_obstacle
from osrdyne.ingress.checks import AGE_CHECK, KEY_CHECK, IngressChecks
from osrdyne.ingress.policies.authorization import authorization_check, delivery_authorization_check, receive_check
from osrdyne.ingress.policies.lifetimes import removal_check
from osrdyne.ingress.policies.limits import delivery_checks, request_checks
from osrdyne.ingress.policies.poison_drop import PoisonDrop, parse_poison_drop
from osrdyne.ingress.policies.policy import Bounds
from osrdyne.ingress.policies.table import bounds_of
from osrdyne.pool.context import RequestQueues, TermContext, TermState
from osrdyne.pool.groups.eviction import GroupEviction
from osrdyne.pool.groups.idle import IdleReaper
from osrdyne.pool.groups.memory import MemoryRelief
from osrdyne.pool.ports import TokenVerifier
from osrdyne.pool.queues.delivery_limits import DeliveryLimits
from osrdyne.pool.queues.depths import QueueDepths
from osrdyne.pool.queues.lifetimes import QueueLifetimes
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.queues.resync import Resync
from osrdyne.pool.queues.topology_watch import KeptParameter, TopologyWatch
from osrdyne.pool.routing.active_manifest import ActiveManifest, ActiveSplitter
from osrdyne.pool.routing.circuits import SNAPSHOT as CIRCUITS_SNAPSHOT
from osrdyne.pool.routing.circuits import ActiveCircuits
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.pool.routing.policies import ActivePolicies
from osrdyne.pool.routing.priorities import PriorityLevels, UnusedLevels
from osrdyne.pool.routing.profiles import ActiveProfiles
from osrdyne.pool.routing.quotas import SNAPSHOT as QUOTA_SNAPSHOT
from osrdyne.pool.routing.quotas import ActiveQuotas
from osrdyne.pool.routing.rates import WorkerRates
from osrdyne.pool.routing.retries import RetryQueuesLoop
from osrdyne.pool.routing.routes import ActiveRoutes, RouteStore
from osrdyne.pool.routing.telemetry import ActiveLog
from osrdyne.pool.routing.worker_principal import WorkerPrincipal
from osrdyne.pool.state.groups.admission import Admission, KeyCounter
from osrdyne.pool.state.groups.paused_groups import PausedGroups
from osrdyne.pool.state.groups.profiles import GroupProfiles
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.observed import QueueStatuses, WorkerStatuses
from osrdyne.pool.state.queues.backlog import PriorityBacklog
from osrdyne.pool.state.queues.created_queues import CreatedQueues
from osrdyne.pool.state.queues.lag import GroupLags
from osrdyne.pool.state.workers.crashes import DeathRegister, EndedWorkers, PoisonTexts
from osrdyne.pool.state.workers.instances import InstanceInventory
from osrdyne.pool.state.workers.rates import GroupRates
from osrdyne.pool.state.workers.restart_backoff import RestartBackoffs
from osrdyne.pool.state.workers.start_durations import StartDurations
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.pool.workers.actions import WorkerActions
from osrdyne.pool.workers.autoscaler import Autoscaler
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.pool.workers.liveness import WorkerLiveness
from osrdyne.pool.workers.loop import WorkerGroupsLoop
from osrdyne.pool.workers.pooled import PooledLink, PooledTerm
from osrdyne.pool.workers.progress import StartForecast
from osrdyne.pool.workers.reattached import ReattachedWorkers
from osrdyne.pool.workers.specs import choose_credentials, scaling_rules, spec_factory, worker_shape
from osrdyne.processors import activity
from osrdyne.processors.audit import AuditTrail
from osrdyne.processors.consumers import ControllerConsumers, Processor
from osrdyne.processors.expiry.sweeper import ExpirySweeper
from osrdyne.processors.failures.dead_letters import DeadLetterResponder, PoisonRules
from osrdyne.processors.failures.poison_drop import PoisonDrops
from osrdyne.processors.failures.removals import RemovalResponder
from osrdyne.processors.failures.start_failures import StartFailureResponder
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.poison.evidence import EvidenceCollector
from osrdyne.processors.poison.inventory import PoisonInventory
from osrdyne.processors.prefetch import first_prefetch
from osrdyne.processors.progress import PREFETCH as PROGRESS_PREFETCH
from osrdyne.processors.progress import ProgressResponder
from osrdyne.processors.publish_order import PublishOrder
from osrdyne.processors.replies import Replier
from osrdyne.processors.requests.cancellations import PREFETCH as CANCEL_PREFETCH
from osrdyne.processors.requests.cancellations import CancelProcessor, GroupsOfKeys, KeptCancels
from osrdyne.processors.requests.forwarder import Forwarder, Router
from osrdyne.processors.requests.ingress import IngressRouter, IngressRules, Provenance
from osrdyne.processors.requests.lengths import QueueLengths
from osrdyne.processors.requests.orphans import DirectRouter
from osrdyne.processors.requests.telemetry import LogWriter
from osrdyne.processors.requests.waiting import WaitingRequests
from osrdyne.protocol.names import Key
from osrdyne.telemetry.positions import LivePositions, PositionStore
from osrdyne.telemetry.schedule import TableRules
from osrdyne.telemetry.status import LogInspector

if TYPE_CHECKING:
    from osrdyne.telemetry.scheduler import Caller, IngestScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The dependencies of a term: its context and connections, and objects of the daemon that outlive it.

    `open_pool` announces this leader and returns the pinned keys. `unpin` removes a pin that an operator stored.
    `parameters`: global parameters of RabbitMQ that the topology watch keeps. `key_counter`: the keys for which this
    daemon has declared queues. `verifier`: of the tokens of requests; None if the configuration has neither tokens nor
    keys. `measures_lag`: keep the metrics of the readers of the log, and request ingests, over own connections.
    """

    context: TermContext
    session: LeaderSession
    token: Token
    driver: Driver
    management: ManagementClient
    open_pool: Callable[[], Awaitable[Sequence[Key]]]
    unpin: Callable[[Key], Awaitable[None]] | None = None
    parameters: Sequence[KeptParameter] = ()
    key_counter: KeyCounter
    verifier: TokenVerifier | None = None
    measures_lag: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """The request queues: commands on them, listings of them, and the loop that makes them as desired."""

    commands: RequestQueueCommands
    listing: RequestQueueListing
    depths: QueueDepths
    loop: RequestQueuesLoop
    limits: DeliveryLimits


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
    """Routes and splitter of a managed pool, the profiles, the log of telemetry, and the topology that they need."""

    routes: ActiveRoutes
    splitter: ActiveSplitter
    profiles: ActiveProfiles
    policies: ActivePolicies
    worker_principal: WorkerPrincipal
    quotas: ActiveQuotas
    rates: WorkerRates
    circuits: ActiveCircuits
    lifetimes: QueueLifetimes
    unused_levels: UnusedLevels
    log: ActiveLog
    log_inspector: LogInspector
    scheduler: IngestScheduler | None
    topology: TopologyWatch

    @property
    def manifests(self) -> Mapping[ManifestKind, ActiveManifest[Any]]:
        return {
            ManifestKind.ROUTES: self.routes,
            ManifestKind.SPLITTER: self.splitter,
            ManifestKind.PROFILES: self.profiles,
            ManifestKind.POLICIES: self.policies,
            ManifestKind.QUOTA: self.quotas,
            ManifestKind.CIRCUITS: self.circuits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The slow loops over all groups: eviction, the end of idle groups, liveness of workers, the memory of pooled
    processes, the resync. `reattached`: None if RabbitMQ attaches no consumer to another queue."""

    eviction: GroupEviction
    idle: IdleReaper
    liveness: WorkerLiveness
    reattached: ReattachedWorkers | None
    memory: MemoryRelief
    lags: GroupLags
    resync: Resync


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """The consumers of the controller's queues, and the components that answer requests from other queues."""

    consumers: ControllerConsumers
    replier: Replier
    checks: IngressChecks
    forwarder: Forwarder
    poison: PoisonInventory
    progress: ProgressResponder
    start_failures: StartFailureResponder
    removals: RemovalResponder
    drops: PoisonDrops
    audit: AuditTrail


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

    async def apply_policies(self, longest_ttl: float) -> None:
        """Put the policies of the pool on the broker; `longest_ttl` in seconds is the longest of the routes."""
        await _apply_policies(self.resources, self.queues, longest_ttl)


def wire_term(resources: Resources) -> Wiring:
    """Build every object of a term. Nothing runs yet, and nothing has been sent to RabbitMQ."""
    state = wire_state(resources)
    policies = wire_policies(resources, state)
    principal = WorkerPrincipal(resources.context, policies=policies, verifier=resources.verifier)
    queues = wire_queues(resources, state, policies)
    workers = wire_workers(resources, state, queues, policies, principal)
    routing = wire_routing(resources, state, queues, workers, policies, principal)
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
    driver = resources.driver
    shape = worker_shape(driver, settings)
    if isinstance(driver, PooledDriver):
        profiles = GroupProfiles(settings, shape=shape, use_processes=driver.use_settings)
    else:
        profiles = GroupProfiles(settings, shape=shape)
    backlog = PriorityBacklog(since=clock.monotonic() if layout.managed else None)
    worker_reports = WorkerRegistry(clock)
    # A driver that starts no workers fills no host: only the number of keys is limited then.
    admission = Admission(
        max_groups=lambda: _max_groups(resources, profiles),
        max_waiting=lifecycle.max_waiting_groups,
        key_counter=resources.key_counter,
        rank=backlog.rank,
    )
    return TermState(
        tracker=PoolStateTracker(
            term=resources.token.term,
            delays=profiles.delays_of,
            clock=clock,
            waits=admission.is_waiting,
        ),
        admission=admission,
        layout=layout,
        queue_status=QueueStatuses(),
        worker_status=WorkerStatuses(),
        worker_reports=worker_reports,
        instances=InstanceInventory(),
        restarts=RestartBackoffs(),
        start_durations=StartDurations(worker_reports),
        crashes=DeathRegister(),
        ended_workers=EndedWorkers(),
        poison_texts=PoisonTexts(clock, seconds=settings.requests.poison_time),
        profiles=profiles,
        backlog=backlog,
        created_queues=CreatedQueues(bounds_for(settings, resources.driver)),
        paused=PausedGroups(),
        rates=GroupRates(clock),
    )


def _max_groups(resources: Resources, profiles: GroupProfiles) -> float:
    """How many groups may be up: as many as the settings allow, and the processes of pooled workers have room for if
    all workers are pooled."""
    driver, settings = resources.driver, resources.context.settings
    if not driver.manages_workers:
        return math.inf
    room: float = math.inf
    if isinstance(driver, PooledDriver) and profiles.all_share:
        room = driver.rules.capacity // settings.worker.scaling.min
    return max(1, min(settings.lifecycle.max_groups, room))


def bounds_for(settings: Settings, driver: Driver) -> Bounds:
    """The bounds of queue policies with this driver."""
    bounds = bounds_of(settings)
    # The leader cannot keep workers from starting that another program starts, or Kubernetes for a group.
    decides = driver.manages_workers and driver.instance_is_worker
    return replace(bounds, authorizes_workers=bounds.authorizes_workers and decides)


def wire_policies(resources: Resources, state: TermState) -> ActivePolicies:
    """The queue policies: those of created queues, and those of the document."""
    return ActivePolicies(
        resources.context,
        resources.management,
        created=state.created_queues,
        present=lambda: {*state.queue_status.existing(), *state.worker_status.keys()},
    )


def wire_queues(resources: Resources, state: TermState, policies: ActivePolicies) -> Queues:
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
    limits = DeliveryLimits(
        context,
        queue_status=state.queue_status,
        limit_of=lambda key: None if (found := policies.of(key)) is None else found.policy.max_dequeue_retries,
        policy_changes=state.created_queues.policy_changes,
        management=management,
        lease=session.token,
    )
    return Queues(commands=commands, listing=listing, depths=depths, loop=loop, limits=limits)


def wire_workers(
    resources: Resources, state: TermState, queues: Queues, policies: ActivePolicies, principal: WorkerPrincipal
) -> Workers:
    context, session, driver = resources.context, resources.session, resources.driver
    pooled = driver if isinstance(driver, PooledDriver) else None
    credentials = choose_credentials(
        context,
        layout=state.layout,
        management=resources.management,
        driver=driver,
        alive=lambda: state.instances.worker_ids() | (set() if pooled is None else pooled.process_ids()),
    )
    control = WorkerControl(context, tracker=state.tracker, paused=state.paused, publisher=session.publisher)
    actions = WorkerActions(
        context,
        state,
        driver=driver,
        make_spec=spec_factory(state, credentials),
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
        concurrency_of=lambda key: state.profiles.of(key).settings.worker.concurrency,
        readers_of=partial(_readers, state.created_queues, policies, principal, driver),
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


def _readers(
    created: CreatedQueues, policies: ActivePolicies, principal: WorkerPrincipal, driver: Driver, key: Key
) -> int | None:
    """The maximum number of workers of a key; None if only the settings limit it."""
    # A platform that manages the workers of a group cannot drain them: they end when the queue is proven empty.
    if not driver.instance_is_worker:
        return None
    if created.is_ending(key) or principal.is_refused(key):
        return 0
    return None if (found := policies.of(key)) is None else found.policy.max_concurrent_readers


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
        worker_reports=state.worker_reports,
    )
    return PooledTerm(driver, link)


def wire_routing(
    resources: Resources,
    state: TermState,
    queues: Queues,
    workers: Workers,
    policies: ActivePolicies,
    principal: WorkerPrincipal,
) -> Routing:
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
        apply_policy=lambda longest_ttl: _apply_policies(resources, queues, longest_ttl),
    )
    splitter = ActiveSplitter(context, management)
    profiles = ActiveProfiles(
        context,
        state,
        management,
        driver_obstacle=lambda profile: profile_obstacle(context.settings, profile, resources.driver),
        on_change=workers.loop.settings_changed,
    )
    quotas = ActiveQuotas(
        context, management, snapshots=session.snapshots(QUOTA_SNAPSHOT, management), rates=state.rates
    )
    rates = WorkerRates(context, rates=state.rates, worker_reports=state.worker_reports, control=workers.control)
    circuits = ActiveCircuits(
        context,
        management,
        snapshots=session.snapshots(CIRCUITS_SNAPSHOT, management),
        routes=lambda: routes.names,
        paused=state.paused,
        queue_status=state.queue_status,
        worker_reports=state.worker_reports,
        control=workers.control,
    )
    lifetimes = QueueLifetimes(
        context,
        created=state.created_queues,
        tracker=state.tracker,
        queue_status=state.queue_status,
        worker_status=state.worker_status,
        parameters=management,
        lease=session.token,
        may_have_returned=lambda queue: routes.may_have_returned(queue, context.clock.monotonic()),
        unpin=resources.unpin,
    )
    unused_levels = UnusedLevels(
        context,
        layout=state.layout,
        queue_status=state.queue_status,
        listings=queues.listing,
        queue_loop=queues.loop,
        control=workers.control,
    )
    log = ActiveLog(context, management=management, declare=session.declare_persisted)
    log_inspector, scheduler = wire_telemetry(resources, state)
    topology = TopologyWatch(
        context,
        expected=lambda: Topology((*routes.expected_topology().declarations, *log.topology.declarations)),
        policies=lambda: _policies(resources, routes.longest_ttl),
        parameters=[*resources.parameters, routes, splitter, profiles, policies, quotas, circuits, lifetimes],
        management=management,
        declare=session.declare,
        declare_retry_queues=routes.declare_retry_queues,
        verify_bindings=queues.loop.verify_all,
        lease=session.token,
    )
    return Routing(
        routes=routes,
        splitter=splitter,
        profiles=profiles,
        policies=policies,
        worker_principal=principal,
        quotas=quotas,
        rates=rates,
        circuits=circuits,
        lifetimes=lifetimes,
        unused_levels=unused_levels,
        log=log,
        log_inspector=log_inspector,
        scheduler=scheduler,
        topology=topology,
    )


def wire_telemetry(resources: Resources, state: TermState) -> tuple[LogInspector, IngestScheduler | None]:
    """The inspector of the log's readers, and the scheduler of ingests; None without tables."""
    context, clock, metrics = resources.context, resources.context.clock, resources.context.metrics
    tables = context.settings.telemetry.tables
    store = PositionStore(resources.management, pool=context.names.pool)
    positions = LivePositions(store, tables=[table.name for table in tables], time=clock.time)
    inspector = LogInspector(
        context.names,
        options=connection_options(context.settings, purpose="telemetry", heartbeat=context.settings.broker.heartbeat),
        positions=positions,
        clock=clock,
        metrics=metrics,
    )
    if not tables:
        return inspector, None
    # Imported here: most daemons do not need the client.
    from osrdyne.telemetry.scheduler import IngestScheduler

    scheduler = IngestScheduler(
        [
            TableRules(
                table.name,
                table.pool or context.names.pool,
                target_lag=table.target_lag,
                interval=table.interval,
                at_once=table.at_once,
                request_timeout=table.request_timeout,
                token_file=table.token_file,
            )
            for table in tables
        ],
        inspector=inspector,
        positions=positions,
        open_caller=partial(_open_caller, context),
        rate_of=lambda key: state.rates.of_table(Key(key)),
        clock=clock,
        metrics=metrics,
    )
    return inspector, scheduler


async def _open_caller(context: TermContext, pool: str) -> Caller:
    """A client of a pool on the same RabbitMQ, on a connection of its own."""
    from osrdyne.client import AsyncClient

    options = connection_options(context.settings, purpose="scheduler", heartbeat=context.settings.broker.heartbeat)
    client = AsyncClient(options.uri, pool, name=options.name, tls=options.tls, clock=context.clock)
    return await client.__aenter__()


async def _apply_policies(resources: Resources, queues: Queues, longest_ttl: float) -> None:
    policies = _policies(resources, longest_ttl)
    await apply_policies(resources.management, *policies)
    await queues.limits.use(policies[0])


def _policies(resources: Resources, longest_ttl: float) -> tuple[PolicySpec, ...]:
    """The policies of the pool; that of its request queues is the first."""
    return pool_policies(resources.context.settings, resources.session.version, longest_ttl=longest_ttl)


def wire_groups(resources: Resources, state: TermState, queues: Queues, workers: Workers) -> Groups:
    context = resources.context
    eviction = GroupEviction(
        context,
        tracker=state.tracker,
        admission=state.admission,
        worker_status=state.worker_status,
        worker_reports=state.worker_reports,
        depths=queues.depths,
        rank=state.profiles.eviction_rank,
    )
    idle = IdleReaper(
        context,
        tracker=state.tracker,
        queue_status=state.queue_status,
        worker_status=state.worker_status,
        depths=queues.depths,
        is_removed=state.created_queues.is_ending,
    )
    liveness = WorkerLiveness(
        context,
        tracker=state.tracker,
        worker_reports=state.worker_reports,
        instances=state.instances,
        control=workers.control,
        worker_loop=workers.loop,
        paused=state.paused,
    )
    reattached = ReattachedWorkers(
        context,
        listings=queues.listing,
        worker_reports=state.worker_reports,
        control=workers.control,
        found_unbound=queues.loop.found_unbound,
    )
    lags = GroupLags(context.clock, state.backlog)
    resync = Resync(
        context,
        tracker=state.tracker,
        queue_status=state.queue_status,
        queue_loop=queues.loop,
        queue_commands=queues.commands,
        listings=queues.listing,
        on_listing=(
            liveness.take_listing,
            eviction.take_listing,
            state.backlog.take_listing,
            lags.take_listing,  # after the backlog, whose figures it follows
            state.worker_reports.take_listing,
        ),
    )
    memory = MemoryRelief(
        context,
        tracker=state.tracker,
        processes=None if workers.pooled is None else workers.pooled.driver,
        at_rest=eviction.is_at_rest,
        rank=state.profiles.eviction_rank,
    )
    return Groups(
        eviction=eviction,
        idle=idle,
        liveness=liveness,
        # Later versions cancel the consumers of a deleted queue.
        reattached=reattached if resources.session.version.reattaches_consumers else None,
        memory=memory,
        lags=lags,
        resync=resync,
    )


def wire_processors(
    resources: Resources, state: TermState, queues: Queues, workers: Workers, routing: Routing
) -> Processors:
    context, session = resources.context, resources.session
    names, publisher = context.names, session.publisher
    forgeries = Forgeries(context)
    replier = Replier(context, publisher=publisher, forgeries=forgeries)
    kept_cancels, waiting = KeptCancels(context.clock), WaitingRequests(context)
    checks = wire_checks(resources, state, routing)
    forwarder, sweeper = wire_forwarder(
        resources, state, queues, routing, kept_cancels, waiting, replier, forgeries, checks
    )
    drops = PoisonDrops(
        context,
        drop_of=partial(_poison_drop, routing.policies),
        connect=partial(session.open_another, "poison drop"),
    )
    dead_letters = DeadLetterResponder(
        context,
        publisher=publisher,
        replier=replier,
        forgeries=forgeries,
        worker_status=state.worker_status,
        topology=routing.topology,
        circuits=routing.circuits,
        poison=PoisonRules(
            limit_of=queues.limits.of,
            evidence=EvidenceCollector(context, worker_reports=state.worker_reports, crashes=state.crashes),
            texts=state.poison_texts,
            drops=drops,
        ),
    )
    cancels = CancelProcessor(
        context,
        tracker=state.tracker,
        routes=routing.routes,
        splitter=routing.splitter,
        kept=kept_cancels,
        publisher=publisher,
        forgeries=forgeries,
        on_cancel=waiting.cancel,
    )
    progress = ProgressResponder(
        context,
        forecast=StartForecast(
            context,
            state,
            start_queue=workers.loop.start_queue,
            manages_workers=resources.driver.manages_workers,
        ),
        groups=GroupsOfKeys(state.tracker, routing.routes, routing.splitter),
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
        circuits=routing.circuits,
        crashes=state.crashes,
    )
    bounded = first_prefetch(context.settings.requests.max_message_bytes)
    consumers = ControllerConsumers(
        [  # orphans last: the reports and dead letters that they cause find their consumers open
            Processor(names.activity_queue, activity.PREFETCH, reports.run),
            Processor(names.dead_letter_queue, bounded, dead_letters.run),
            Processor(names.cancel_queue, CANCEL_PREFETCH, cancels.run),
            Processor(names.progress_queue, PROGRESS_PREFETCH, progress.run),
            Processor(names.orphan_queue, bounded, forwarder.run),
        ],
        open_channel=session.channel,
        sweeper=sweeper,
        clock=context.clock,
        proofs=session.proofs(),
        on_finish=replier.finish,
    )
    poison = PoisonInventory(
        context, publisher=publisher, open_channel=session.channel, forgeries=forgeries, user=session.token.user
    )
    start_failures = StartFailureResponder(
        context,
        layout=state.layout,
        worker_status=state.worker_status,
        queue_status=state.queue_status,
        replier=replier,
        open_channel=session.channel,
        worker_loop=workers.loop,
        is_removed=state.created_queues.is_ending,
        circuits=routing.circuits,
    )
    removals = RemovalResponder(
        context,
        created=state.created_queues,
        tracker=state.tracker,
        layout=state.layout,
        queue_status=state.queue_status,
        replier=replier,
        open_channel=session.channel,
    )
    return Processors(
        consumers=consumers,
        replier=replier,
        checks=checks,
        forwarder=forwarder,
        poison=poison,
        progress=progress,
        start_failures=start_failures,
        removals=removals,
        drops=drops,
        audit=AuditTrail(context, publisher=publisher, open_channel=session.channel, forgeries=forgeries),
    )


def _poison_drop(policies: ActivePolicies, key: Key) -> PoisonDrop | None:
    found = policies.of(key)
    text = None if found is None else found.policy.poison_message_drop
    return None if text is None else parse_poison_drop(text)


def wire_checks(resources: Resources, state: TermState, routing: Routing) -> IngressChecks:
    """The checks of a managed pool, which the ingress applies and `explain` shows."""
    policy_of = routing.policies.of
    return IngressChecks(
        [
            KEY_CHECK,
            authorization_check(policy_of),
            AGE_CHECK,
            *request_checks(policy_of),
            routing.quotas.check(),
        ],
        [
            delivery_authorization_check(policy_of),
            receive_check(policy_of, routing.worker_principal.refuse),
            removal_check(state.created_queues.get),
            routing.circuits.check(),
            *delivery_checks(policy_of),
        ],
    )


def wire_forwarder(
    resources: Resources,
    state: TermState,
    queues: Queues,
    routing: Routing,
    kept_cancels: KeptCancels,
    waiting: WaitingRequests,
    replier: Replier,
    forgeries: Forgeries,
    checks: IngressChecks,
) -> tuple[Forwarder, ExpirySweeper | None]:
    """The consumer of the orphan queue, with the router of the pool's kind. All requests of a managed pool come there;
    the sweeper of expired requests shares the order of its publishes."""
    context, session = resources.context, resources.session
    publish_order = PublishOrder()
    request_queues = RequestQueues(layout=state.layout, status=state.queue_status, commands=queues.commands)
    sweeper = None
    if state.layout.managed and context.settings.requests.check_entire_queue_on_cleanup:
        sweeper = ExpirySweeper(
            context,
            queues=request_queues,
            tracker=state.tracker,
            listings=queues.listing,
            routes=routing.routes,
            publish_order=publish_order,
            session=session,
            limit_of=queues.limits.of,
        )
    lengths = log_writer = None
    router: Router = DirectRouter(context, tracker=state.tracker, forgeries=forgeries)
    if state.layout.managed:
        lengths = QueueLengths(
            context,
            policies=routing.policies,
            created=state.created_queues,
            queues=request_queues,
            publish_order=publish_order,
            replier=replier,
            waiting=waiting,
            open_channel=session.channel,
        )
        log_writer = LogWriter(context, log=routing.log, publisher=session.publisher, replier=replier)
        router = IngressRouter(
            context,
            IngressRules(
                routes=routing.routes,
                splitter=routing.splitter,
                policies=routing.policies,
                circuits=routing.circuits,
                log=routing.log,
                checks=checks,
            ),
            Provenance(forgeries=forgeries, verifier=resources.verifier, user=session.token.user),
            tracker=state.tracker,
            created=state.created_queues,
            backlog=state.backlog,
            cancels=kept_cancels,
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
        lengths=lengths,
        log_writer=log_writer,
    )
    return forwarder, sweeper

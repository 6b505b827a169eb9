"""What the components of one leader's term share: its dependencies, its in-memory state, and its request queues. Built
by the wiring."""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.aio.clock import Clock
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import Settings
from osrdyne.metrics import Metrics
from osrdyne.pool.state.groups.admission import Admission
from osrdyne.pool.state.groups.paused_groups import PausedGroups
from osrdyne.pool.state.groups.profiles import GroupProfiles
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.observed import QueueStatuses, WorkerStatuses
from osrdyne.pool.state.queues.backlog import PriorityBacklog
from osrdyne.pool.state.queues.created_queues import CreatedQueues
from osrdyne.pool.state.workers.crashes import DeathRegister, EndedWorkers, PoisonTexts
from osrdyne.pool.state.workers.instances import InstanceInventory
from osrdyne.pool.state.workers.rates import GroupRates
from osrdyne.pool.state.workers.restart_backoff import RestartBackoffs
from osrdyne.pool.state.workers.start_durations import StartDurations
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.protocol.names import PoolNames


@dataclass(frozen=True, slots=True)
class TermContext:
    """The shared dependencies: the names of the pool's objects in RabbitMQ, settings, clock and metrics."""

    names: PoolNames
    settings: Settings
    clock: Clock
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TermState:
    """The in-memory state: what is desired, observed and remembered. A new term starts with an empty one. Each part has
    one writer, which its module names.

    A component that uses more than four parts takes the whole; the others take the parts they use.
    """

    tracker: PoolStateTracker
    admission: Admission
    layout: QueueLayout
    queue_status: QueueStatuses
    worker_status: WorkerStatuses
    worker_reports: WorkerRegistry
    instances: InstanceInventory
    restarts: RestartBackoffs
    start_durations: StartDurations
    crashes: DeathRegister
    ended_workers: EndedWorkers
    poison_texts: PoisonTexts
    profiles: GroupProfiles
    backlog: PriorityBacklog
    created_queues: CreatedQueues
    paused: PausedGroups
    rates: GroupRates


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestQueues:
    """The request queues of the pool: the queues of each key, their observed state, and the commands on them."""

    layout: QueueLayout
    status: QueueStatuses
    commands: RequestQueueCommands

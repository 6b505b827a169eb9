"""The in-memory state of one term: what is desired, observed and remembered. A new term starts with an empty one."""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.pool.state.admission import Admission
from osrdyne.pool.state.backlog import PriorityBacklog
from osrdyne.pool.state.crashes import DeathRegister, PoisonTexts
from osrdyne.pool.state.instances import InstanceInventory
from osrdyne.pool.state.observed import QueueStatuses, WorkerStatuses
from osrdyne.pool.state.restart_backoff import RestartBackoffs
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.pool.state.worker_reports import WorkerRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class TermState:
    """The parts of the state. Each has one writer, which its module names.

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
    crashes: DeathRegister
    poison_texts: PoisonTexts
    backlog: PriorityBacklog

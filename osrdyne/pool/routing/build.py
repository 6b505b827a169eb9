"""Puts together what routes are about in one term: classes, wait queues, the manifest in force. Used by the term."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Clock
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.session import LeaderSession
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import Settings
from osrdyne.ingress.acceptance import TtlLimits
from osrdyne.metrics import Metrics
from osrdyne.pool.queues.loop import RequestQueuesLoop
from osrdyne.pool.routing.priorities import PriorityClasses
from osrdyne.pool.routing.retries import RetryQueuesLoop
from osrdyne.pool.routing.routes import RoutesInForce, RouteStore
from osrdyne.pool.state.observed import QueueBoard
from osrdyne.pool.state.worker_reports import WorkerRegistry
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.protocol.names import Key


def build_routing(
    settings: Settings,
    *,
    session: LeaderSession,
    management: ManagementClient,
    layout: QueueLayout,
    board: QueueBoard,
    registry: WorkerRegistry,
    queues: RequestQueuesLoop,
    control: WorkerControl,
    count_ready: Callable[[Key, int], Awaitable[int]],
    keep_for: Callable[[float], Awaitable[None]],
    clock: Clock,
    metrics: Metrics,
) -> RoutesInForce:
    """The routes of a term that is about to begin."""
    return RoutesInForce(
        layout=layout,
        classes=PriorityClasses(
            layout=layout, board=board, registry=registry, queues=queues, control=control, clock=clock
        ),
        retries=RetryQueuesLoop(
            session.wait_queues(management),
            needed_for=settings.requests.ttl,
            settle_delay=settings.lifecycle.settle_delay,
            clock=clock,
        ),
        store=RouteStore(management, pool=session.names.pool),
        declare=session.declare,
        count_ready=count_ready,
        ttl_limits=TtlLimits(settings.requests.ttl, settings.requests.longest_ttl),
        keep_for=keep_for,
        clock=clock,
        metrics=metrics,
    )

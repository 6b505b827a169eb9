"""Puts together what consumes the orphan queue: the orphan processor, or in a managed pool, where every request comes
there, the ingress and the cleaner of its queues, which share the order of what goes into them. Used by the term."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Clock
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.listings import RequestQueueListing
from osrdyne.broker.session import LeaderSession
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.config.models import Settings
from osrdyne.metrics import Metrics
from osrdyne.pool.routing.backlog import ClassBacklog
from osrdyne.pool.routing.deadlines import PassedDeadlines
from osrdyne.pool.routing.routes import RoutesInForce
from osrdyne.pool.routing.splitter import SplitterInForce
from osrdyne.pool.state.admission import Admission
from osrdyne.pool.state.observed import QueueBoard
from osrdyne.pool.state.tracker import PoolStateTracker
from osrdyne.processors.expiry.sweeper import QueueCleaner, Ready
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.publish_order import Lanes
from osrdyne.processors.replies import Replier
from osrdyne.processors.requests.forwarding import Doubt
from osrdyne.processors.requests.ingress import IngressProcessor
from osrdyne.processors.requests.kept_cancels import KeptCancels
from osrdyne.processors.requests.orphans import OrphanProcessor
from osrdyne.protocol.names import Key


def build_orphan_processor(
    settings: Settings,
    *,
    session: LeaderSession,
    layout: QueueLayout,
    management: ManagementClient,
    tracker: PoolStateTracker,
    board: QueueBoard,
    admission: Admission,
    doubt: Doubt,
    backlog: ClassBacklog,
    routing: RoutesInForce,
    splitting: SplitterInForce,
    count_ready: Callable[[Key, int | None], Awaitable[int]],
    cancels: KeptCancels,
    replier: Replier,
    forgeries: Forgeries,
    clock: Clock,
    metrics: Metrics,
) -> OrphanProcessor | IngressProcessor:
    """What a term that is about to begin needs."""
    if not layout.managed:
        return OrphanProcessor(
            names=layout.names,
            tracker=tracker,
            board=board,
            admission=admission,
            doubt=doubt,
            publisher=session.publisher,
            replier=replier,
            forgeries=forgeries,
            ttl=settings.requests.ttl,
            max_clock_skew=settings.requests.max_clock_skew,
            max_message_bytes=settings.requests.max_message_bytes,
            clock=clock,
            metrics=metrics,
        )
    lanes = Lanes()
    return IngressProcessor(
        names=layout.names,
        tracker=tracker,
        board=board,
        admission=admission,
        doubt=doubt,
        backlog=backlog,
        routing=routing,
        splitting=splitting,
        lanes=lanes,
        cleaner=_build_cleaner(
            settings,
            session=session,
            layout=layout,
            ready=RequestQueueListing(management, layout.names, layout),
            count_ready=count_ready,
            tracker=tracker,
            board=board,
            routing=routing,
            lanes=lanes,
            clock=clock,
            metrics=metrics,
        ),
        cancels=cancels,
        publisher=session.publisher,
        replier=replier,
        forgeries=forgeries,
        max_clock_skew=settings.requests.max_clock_skew,
        max_message_bytes=settings.requests.max_message_bytes,
        clock=clock,
        metrics=metrics,
    )


def _build_cleaner(
    settings: Settings,
    *,
    session: LeaderSession,
    layout: QueueLayout,
    ready: Ready,
    count_ready: Callable[[Key, int | None], Awaitable[int]],
    tracker: PoolStateTracker,
    board: QueueBoard,
    routing: RoutesInForce,
    lanes: Lanes,
    clock: Clock,
    metrics: Metrics,
) -> QueueCleaner | None:
    """Where the settings ask for one."""
    requests = settings.requests
    if not requests.check_entire_queue_on_cleanup:
        return None
    return QueueCleaner(
        layout=layout,
        tracker=tracker,
        board=board,
        lanes=lanes,
        deadlines=PassedDeadlines(skew_ms=int(requests.max_clock_skew * 1000)),
        ready=ready,
        count_ready=count_ready,
        publisher=session.publisher,
        open_channel=session.channel,
        may_have_returned=routing.may_have_returned,
        delivery_limit=requests.delivery_limit,
        interval=requests.cleanup_interval,
        max_clock_skew=requests.max_clock_skew,
        clock=clock,
        metrics=metrics,
    )

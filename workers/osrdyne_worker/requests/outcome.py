"""The outcome of a request, and the time limit of its handler. Pure decisions; the processor carries them out."""

from __future__ import annotations

from enum import Enum, auto

from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.statuses import Status
from osrdyne_worker.requests.inflight import Interruption
from osrdyne_worker.runtime.settings import RuntimeSettings

MIN_TIME = 0.001
"""Seconds for a request whose deadline is now."""


class Outcome(Enum):
    """How the processor settles a request that it does not answer."""

    RETRIED = auto()
    """Acknowledged: RabbitMQ has confirmed the copy that waits for the next attempt."""
    ABANDONED = auto()
    """Acknowledged without a reply: its caller is gone."""
    REPLY_TO_REFUSED = auto()
    """Acknowledged without a reply: its reply address is not allowed."""
    REQUEUED = auto()
    """Returned to the queue; this does not count as a failed delivery."""
    REJECTED = auto()
    """Returned to the queue as a failed delivery, which counts towards the delivery limit."""
    DEAD_LETTERED = auto()
    """Dead-lettered: the controller answers `poison` and keeps the request."""
    LOST = auto()
    """Not settled: RabbitMQ has requeued it already."""


Result = Response | Outcome
"""A reply, or an outcome without a reply."""


def time_left(request: Request, *, now_ms: int) -> float | None:
    """Seconds to the deadline; 0 if it has passed, None without a deadline."""
    if request.deadline_ms is None:
        return None
    if is_past(request.deadline_ms, now_ms=now_ms):
        return 0.0
    # Not 0, which means that the deadline has passed.
    return max(MIN_TIME, (request.deadline_ms - now_ms) / 1000)


def time_to_work(left: float | None, settings: RuntimeSettings) -> float:
    """Seconds for the handler: to the deadline, at most `processing_timeout`."""
    return settings.processing_timeout if left is None else min(left, settings.processing_timeout)


def early_result(*, interruption: Interruption | None, was_cancelled: bool, left: float | None) -> Result | None:
    """The result of a request that must not run; None if it may run."""
    if interruption is not None:
        # Before the deadline: this worker must not answer `expired` to a lost request.
        return result_of(interruption)
    if was_cancelled:
        return result_of(Interruption.CANCELLED)
    if left == 0:
        return Response(Status.EXPIRED, detail="The deadline had passed when a worker received the request.")
    return None


def result_of(interruption: Interruption) -> Result:
    """The result of an interrupted request."""
    match interruption:
        case Interruption.EXPIRED:
            return Response(Status.EXPIRED, detail="The deadline passed before the work was done; it was cancelled.")
        case Interruption.CANCELLED:
            return Response(Status.CANCELLED, detail="The caller cancelled the request.")
        case Interruption.REQUEUED:
            return Outcome.REQUEUED
        case Interruption.LOST:
            return Outcome.LOST

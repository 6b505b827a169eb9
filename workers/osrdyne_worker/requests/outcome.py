"""What becomes of a request, decided from values: its result, and the time it may take. Pure; the processor acts."""

from __future__ import annotations

from enum import Enum, auto

from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.statuses import Status
from osrdyne_worker.requests.inflight import Interruption
from osrdyne_worker.runtime.settings import RuntimeSettings

LEAST_TIME = 0.001
"""Seconds that a request gets whose deadline is this very moment."""


class Settlement(Enum):
    """What happens to a request that gets no reply."""

    GIVE_BACK = auto()
    """To the queue, without blame."""
    REJECT = auto()
    """To the queue, as a failure that counts towards the delivery limit."""
    POISON = auto()
    """To the dead letters, for good: the controller answers `poison` and keeps it."""
    ABANDON = auto()
    """Acknowledged: its caller is gone."""
    REFUSE = auto()
    """Acknowledged: no answer may go to its reply address."""
    DROP = auto()
    """Nothing: RabbitMQ has taken it back already."""


Result = Response | Settlement


def time_left(request: Request, *, now_ms: int, settings: RuntimeSettings) -> float | None:
    """Seconds to the deadline, `max_clock_skew` added; 0 when it has passed, None without one."""
    if request.deadline_ms is None:
        return None
    skew_ms = int(settings.max_clock_skew * 1000)
    if is_past(request.deadline_ms, now_ms=now_ms, skew_ms=skew_ms):
        return 0.0
    return max(LEAST_TIME, (request.deadline_ms + skew_ms - now_ms) / 1000)


def time_to_work(left: float | None, settings: RuntimeSettings) -> float:
    """Seconds for the handler: to the deadline, and never longer than `processing_timeout`."""
    return settings.processing_timeout if left is None else min(left, settings.processing_timeout)


def first_look(*, interruption: Interruption | None, was_cancelled: bool, left: float | None) -> Result | None:
    """The result of a request that is not worked on at all; None for all others."""
    if interruption is not None:
        return result_of(interruption)
    if was_cancelled:
        return result_of(Interruption.CANCELLED)
    if left == 0:
        return Response(Status.EXPIRED, detail="The deadline had passed when a worker got the request.")
    return None


def result_of(interruption: Interruption) -> Result:
    """The result of a request that was not worked on to its end."""
    match interruption:
        case Interruption.EXPIRED:
            return Response(Status.EXPIRED, detail="The work was not done in time and was cancelled.")
        case Interruption.CANCELLED:
            return Response(Status.CANCELLED, detail="The caller cancelled the request.")
        case Interruption.GIVEN_BACK:
            return Settlement.GIVE_BACK
        case Interruption.LOST:
            return Settlement.DROP

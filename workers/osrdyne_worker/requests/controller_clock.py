"""The difference between the clocks of worker and controller, as the ages of forwarded requests show it.

The controller of a managed pool sets the deadline of each request by its own clock, and `expiration` to the time that
is left when it publishes. Their difference is the moment of the publish. The request that came fastest shows best how
far apart the clocks are. Used by the processor.
"""

from __future__ import annotations

from collections import deque

from osrdyne.aio.clock import Clock, now_ms
from osrdyne.amqp import Delivery
from osrdyne.protocol.deadlines import DEADLINE_HEADER, MAX_EXPIRATION_MS, parse_expiration_ms

MAX_KNOWN = 32
"""Requests that are compared: so many after a change of the leader or of its clock, the new difference is known."""


class ControllerClock:
    """The clock of the controller, for one worker. `largest_skew`: the allowed difference in seconds."""

    def __init__(self, clock: Clock, *, largest_skew: float) -> None:
        self._clock = clock
        self._largest_ms = int(largest_skew * 1000)
        # By the monotonic clock: the wall clock of this machine may jump meanwhile.
        self._ages_ms: deque[int] = deque(maxlen=MAX_KNOWN)

    def skew_of(self, delivery: Delivery) -> int:
        """By how many milliseconds the controller's clock is behind the wall clock of this worker, at most; negative if
        it is ahead. Takes the delivery itself into account."""
        since_boot_ms = int(self._clock.monotonic() * 1000)
        deadline, left = delivery.headers.get(DEADLINE_HEADER), parse_expiration_ms(delivery.properties.expiration)
        # With the largest `expiration`, the difference is not the moment of the publish.
        if isinstance(deadline, int) and left is not None and left < MAX_EXPIRATION_MS:
            self._ages_ms.append(since_boot_ms - (deadline - left))
        if not self._ages_ms:
            return self._largest_ms
        skew_ms = min(self._ages_ms) + now_ms(self._clock) - since_boot_ms
        return max(-self._largest_ms, min(skew_ms, self._largest_ms))

"""The requests that wait for room in a full queue, and the end of the wait of those that expire or are cancelled.

Only the first request of a group tries to get room. One behind it could wait up to EnqueueTimeout for its turn, and
must be answered before. Nothing is stored: a waiting request is not acknowledged, and cancels end with the leader's
term. Used by the forwarder, and by the cancel processor.
"""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import Wakeup
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import Refusal
from osrdyne.pool.context import TermContext
from osrdyne.processors.requests.cancellations import CANCELLED, RequestName, name_of
from osrdyne.processors.requests.forwarding import Orphan
from osrdyne.protocol.deadlines import is_past
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

CHECK_INTERVAL = 0.5  # Seconds between two checks for expired requests: 10,000 of them take about 2 ms.

NO_ROOM_IN_TIME = Refusal(Status.EXPIRED, "The request expired before its queue had room.")


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that waits for its admission. `refusal`: why it waits no longer. `pause`: wakes its admission."""

    orphan: Orphan
    routed: list[RoutedRequest]
    pause: Wakeup
    refusal: Refusal | None = None

    @property
    def group(self) -> Key:
        """The key of the group whose queue has to have room."""
        return self.routed[0].key


class WaitingRequests:
    """The waiting requests of one term."""

    def __init__(self, context: TermContext) -> None:
        self._clock, self._metrics = context.clock, context.metrics
        self._requests: dict[WaitingRequest, None] = {}
        self._by_name: dict[RequestName, list[WaitingRequest]] = {}
        self._bytes = 0
        self._cancelled: list[WaitingRequest] = []
        self._changed = Wakeup(context.clock)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def body_bytes(self) -> int:
        """The bytes of their bodies."""
        return self._bytes

    def add(self, orphan: Orphan, routed: list[RoutedRequest]) -> WaitingRequest:
        """Note a request that waits from now on."""
        waiting = WaitingRequest(orphan, routed, Wakeup(self._clock))
        if not self._requests:
            # Nothing was checked while none waited.
            self._changed.set()
        self._requests[waiting] = None
        self._bytes += len(orphan.request.body)
        if (name := name_of(orphan.request)) is not None:
            self._by_name.setdefault(name, []).append(waiting)
        self._metrics.enqueue_waiting.set(len(self._requests))
        return waiting

    def remove(self, waiting: WaitingRequest) -> None:
        """Note a request that waits no longer."""
        del self._requests[waiting]
        self._bytes -= len(waiting.orphan.request.body)
        if (name := name_of(waiting.orphan.request)) is not None:
            self._by_name[name].remove(waiting)
            if not self._by_name[name]:
                del self._by_name[name]
        self._metrics.enqueue_waiting.set(len(self._requests))

    def wake_all(self) -> None:
        """Wake every admission, because the leader's term ends."""
        for waiting in self._requests:
            waiting.pause.set()

    def close(self) -> None:
        """Reset the metric, also if the term was cancelled while requests waited."""
        self._metrics.enqueue_waiting.set(0)

    def cancel(self, name: RequestName, key: Key) -> None:
        """Cancel the requests with this name, and with this key of their client."""
        for waiting in self._by_name.get(name, ()):
            if waiting.refusal is None and waiting.orphan.client_key == key:
                waiting.refusal = CANCELLED
                self._cancelled.append(waiting)
                self._changed.set()

    async def ended(self) -> list[WaitingRequest]:
        """Wait for requests that are cancelled or that expire, each returned once."""
        while True:
            await self._changed.wait(CHECK_INTERVAL if self._requests else None)
            ended, self._cancelled = self._cancelled, []
            now = now_ms(self._clock)
            for waiting in self._requests:
                deadline = waiting.routed[0].deadline.at_ms
                if waiting.refusal is None and is_past(deadline, now_ms=now):
                    waiting.refusal = NO_ROOM_IN_TIME
                    ended.append(waiting)
            if ended:
                return ended

"""The prefetch of one queue: how many of its requests may be in the worker, and through which AMQP consumers.

AMQP's prefetch counts all unacknowledged requests of a consumer. With several queues, however many requests run, only
one of each queue may *wait* in the worker; and a request that is set aside must not block others. Hence a queue has
several consumers, which are opened and closed as requests begin, are set aside, and are settled. In a steady state none
is opened or closed: the acknowledgement of one request brings the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum

from osrdyne.amqp import Consumer


class HeldState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SET_ASIDE = "set-aside"
    SETTLING = "settling"


class QueueConsumer:
    """One consumer of the queue. `consumer` is None until RabbitMQ has confirmed it."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.consumer: Consumer | None = None


class HeldRequest:
    """One unacknowledged request of the queue, from its arrival until it leaves the worker."""

    def __init__(self, prefetch: Prefetch, consumer: QueueConsumer) -> None:
        self._prefetch = prefetch
        self.consumer = consumer
        self.state = HeldState.WAITING

    def begin(self) -> None:
        """Its handler runs from now on."""
        self._prefetch.change(self, HeldState.RUNNING)

    def set_aside(self) -> None:
        """It stays in the worker, and others go first."""
        self._prefetch.change(self, HeldState.SET_ASIDE)

    async def settle(self) -> None:
        """Make room for its acknowledgement. To be awaited right before it is acknowledged or requeued."""
        await self._prefetch.settle(self)

    def leave(self) -> None:
        """It has left the worker."""
        self._prefetch.forget(self)


class Prefetch:
    """The consumers and the unacknowledged requests of one queue.

    `limit`: requests that may be in the worker, running ones included; None: one may wait, however many run.
    `free_slots`: how many requests could begin to run now. `open_consumer` starts one more consumer; `close_consumer`
    cancels one, and its unacknowledged requests stay.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        free_slots: Callable[[], int],
        open_consumer: Callable[[QueueConsumer], None],
        close_consumer: Callable[[QueueConsumer], Awaitable[None]],
    ) -> None:
        self._limit = limit
        self._free_slots = free_slots
        self._open_consumer = open_consumer
        self._close_consumer = close_consumer
        self._requests: set[HeldRequest] = set()
        self._stopped = False
        self.open: list[QueueConsumer] = []

    def start(self) -> None:
        self._open(1 if self._limit is None else self._limit)

    def stop(self) -> None:
        """Open no further consumer."""
        self._stopped = True

    def hold(self, consumer: QueueConsumer) -> HeldRequest:
        """Add a request that has arrived through `consumer`."""
        request = HeldRequest(self, consumer)
        self._requests.add(request)
        return request

    def change(self, request: HeldRequest, state: HeldState) -> None:
        """Change the state of a request, and open consumers for the requests that may come now."""
        request.state = state
        for _ in range(-self._surplus()):
            self._open(1)

    async def settle(self, request: HeldRequest) -> None:
        """Close a consumer if the acknowledgement of `request` would bring one request too many."""
        request.state = HeldState.SETTLING
        if self._limit is None and self._surplus() > 0:
            await asyncio.sleep(0)  # the request that has just been granted a slot has not begun yet
        if self._surplus() > 0 and (consumer := self._superfluous(request)) is not None:
            self.open.remove(consumer)
            await self._close_consumer(consumer)

    def forget(self, request: HeldRequest) -> None:
        self._requests.discard(request)

    def _open(self, prefetch: int) -> None:
        consumer = QueueConsumer(prefetch)
        self.open.append(consumer)
        if not self._stopped:
            self._open_consumer(consumer)

    def _surplus(self) -> int:
        """How many requests too many can come, or wait, once the settling requests are settled; may be negative."""
        set_aside = self._count(HeldState.SET_ASIDE, open_consumer=True)
        can_come = sum(consumer.prefetch for consumer in self.open) - set_aside
        if self._limit is not None:
            return can_come - self._limit
        running = self._count(HeldState.RUNNING, open_consumer=True)
        waiting_of_closed = self._count(HeldState.WAITING, open_consumer=False)
        return can_come - running + waiting_of_closed - 1 - self._free_slots()

    def _count(self, state: HeldState, *, open_consumer: bool) -> int:
        """Requests in `state` whose consumer is open, or is not."""
        return sum(
            request.state is state and (request.consumer in self.open) is open_consumer for request in self._requests
        )

    def _superfluous(self, settling: HeldRequest) -> QueueConsumer | None:
        """The consumer to close when `settling` is settled: its own, unless that one has a prefetch above 1."""
        if self._limit is None or settling.consumer.prefetch == 1 != self._limit:
            return settling.consumer if settling.consumer in self.open else None
        aside = {request.consumer for request in self._requests if request.state is HeldState.SET_ASIDE}
        spare = [consumer for consumer in self.open[1:] if consumer not in aside]
        return spare[-1] if spare else None

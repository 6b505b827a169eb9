"""The prefetch of one queue: how many of its requests may be in the worker, and through which AMQP consumers.

AMQP's prefetch counts all unacknowledged requests of a consumer. A worker of several queues needs another limit: only
one request of each queue may *wait* in the worker, however many run. And a request that is set aside must not block
others. Hence a queue has several consumers, which are opened and closed as requests begin, are set aside, and are
settled. In a steady state none is opened or closed: after the acknowledgement of a request RabbitMQ delivers the next.

Requests of batch handlers share a slot. While a worker has such requests and no others of the queue, an additional
consumer with a large prefetch brings more of them. Requests of other handlers must not wait here: another worker could
run them, and the death of this worker would count as a failed delivery of each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum

from osrdyne.amqp import Consumer


class HeldState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SET_ASIDE = "set-aside"
    SETTLING = "settling"


class QueueConsumer:
    """One consumer of the queue. `consumer` is None until RabbitMQ has confirmed it. `for_batches`: the additional one
    of batch handlers."""

    def __init__(self, prefetch: int, *, for_batches: bool = False) -> None:
        self.prefetch = prefetch
        self.for_batches = for_batches
        self.consumer: Consumer | None = None
        self.held: Counter[HeldState] = Counter()  # its unacknowledged requests by state


class HeldRequest:
    """One unacknowledged request of the queue, from its arrival until it leaves the worker."""

    def __init__(self, prefetch: Prefetch, consumer: QueueConsumer) -> None:
        self._prefetch = prefetch
        self.consumer = consumer
        self.state = HeldState.WAITING
        self.in_batch: bool | None = None

    def classify(self, *, in_batch: bool) -> None:
        """Note whether it will run in a batch."""
        self._prefetch.classify(self, in_batch=in_batch)

    def begin(self) -> None:
        """Note that its handler begins."""
        self._prefetch.change(self, HeldState.RUNNING)

    def set_aside(self) -> None:
        """Note that it stays in the worker while others run first."""
        self._prefetch.change(self, HeldState.SET_ASIDE)

    async def settle(self) -> None:
        """Prepare its acknowledgement or requeueing, after which RabbitMQ may deliver the next request. Call it right
        before."""
        await self._prefetch.settle(self)

    def leave(self) -> None:
        """Note that it has left the worker."""
        self._prefetch.forget(self)


class Prefetch:
    """The consumers and the unacknowledged requests of one queue.

    `limit`: requests that may be in the worker, running ones included; None: one may wait, however many run.
    `more_for_batches`: the prefetch of the additional consumer of batch handlers; 0: without one. `free_slots`: the
    number of further requests that could run now. `open_consumer` starts a consumer; `close_consumer` cancels one and
    leaves its unacknowledged requests in the worker; `close_soon` does so without waiting for it.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        more_for_batches: int = 0,
        free_slots: Callable[[], int],
        open_consumer: Callable[[QueueConsumer], None],
        close_consumer: Callable[[QueueConsumer], Awaitable[None]],
        close_soon: Callable[[QueueConsumer], None],
    ) -> None:
        self._limit = limit
        self._more_for_batches = more_for_batches
        self._free_slots = free_slots
        self._open_consumer = open_consumer
        self._close_consumer = close_consumer
        self._close_soon = close_soon
        self._closed: set[QueueConsumer] = set()  # closed consumers whose requests are still in the worker
        self._kinds: Counter[bool] = Counter()  # requests by `in_batch`
        self._batch_consumer: QueueConsumer | None = None
        self._stopped = False
        self.open: list[QueueConsumer] = []

    def start(self) -> None:
        # Without a limit, one request of each queue: the worker then holds the next request of each level.
        self._open(1 if self._limit is None else self._limit)

    def use(self, limit: int | None, *, more_for_batches: int) -> None:
        """Change the limit. Requests that have arrived stay in the worker, in their order."""
        self._more_for_batches = more_for_batches
        if limit == self._limit:
            return
        self._limit = limit
        if limit is None:
            # Those with the prefetch of the former limit bring more than one request that waits.
            for consumer in [one for one in self.open if one.prefetch > 1 and not one.for_batches]:
                self._remove(consumer)
                self._close_soon(consumer)
        self._open_missing()

    def stop(self) -> None:
        """Open no further consumer."""
        self._stopped = True

    def hold(self, consumer: QueueConsumer) -> HeldRequest:
        """Add a request that has arrived through `consumer`."""
        request = HeldRequest(self, consumer)
        consumer.held[request.state] += 1
        if consumer not in self.open:
            self._closed.add(consumer)  # the request arrived while RabbitMQ read the cancel
        return request

    def classify(self, request: HeldRequest, *, in_batch: bool) -> None:
        """Note whether a request runs in a batch; open or close the consumer of batch handlers accordingly."""
        request.in_batch = in_batch
        self._kinds[in_batch] += 1
        self._adapt_to_kinds()

    def change(self, request: HeldRequest, state: HeldState) -> None:
        """Change the state of a request, and open consumers for the requests that may arrive now."""
        self._set(request, state)
        self._open_missing()

    async def settle(self, request: HeldRequest) -> None:
        """Close a consumer if RabbitMQ would deliver one request too many after the acknowledgement of `request`."""
        self._set(request, HeldState.SETTLING)
        if request.consumer.for_batches:
            return
        if self._limit is None and self._surplus() > 0:
            await asyncio.sleep(0)  # the request that has just been granted a slot has not begun yet
        if self._surplus() > 0 and (consumer := self._superfluous(request)) is not None:
            # Removed before the await: a second request that settles meanwhile must not close the same consumer.
            self._remove(consumer)
            # Cancelled before the acknowledgement is sent, so that RabbitMQ has no consumer to deliver the next request
            # to.
            await self._close_consumer(consumer)

    def forget(self, request: HeldRequest) -> None:
        consumer = request.consumer
        consumer.held[request.state] -= 1
        if consumer in self._closed and not any(consumer.held.values()):
            self._closed.discard(consumer)
        if request.in_batch is not None:
            self._kinds[request.in_batch] -= 1
            self._adapt_to_kinds()
        if self._limit is None:
            # A request of a closed consumer may leave without a run: none follows it.
            self._open_missing()

    def _open_missing(self) -> None:
        # Each with a prefetch of 1: RabbitMQ cannot raise the prefetch of an open consumer.
        for _ in range(-self._surplus()):
            self._open(1)

    def _open(self, prefetch: int, *, for_batches: bool = False) -> QueueConsumer:
        consumer = QueueConsumer(prefetch, for_batches=for_batches)
        self.open.append(consumer)
        # Counted as open even after `stop`, which opens none: otherwise `_surplus` would demand it again and again.
        if not self._stopped:
            self._open_consumer(consumer)
        return consumer

    def _adapt_to_kinds(self) -> None:
        """Open the consumer of batch handlers while all requests are of batches; close it otherwise."""
        if self._stopped or not self._more_for_batches:
            return
        wanted = self._kinds[True] > 0 and self._kinds[False] == 0
        consumer = self._batch_consumer
        if wanted and consumer is None:
            self._batch_consumer = self._open(self._more_for_batches, for_batches=True)
        elif not wanted and consumer is not None:
            self._batch_consumer = None
            self._remove(consumer)
            self._close_soon(consumer)

    @staticmethod
    def _set(request: HeldRequest, state: HeldState) -> None:
        # Counted as they change: a sum over the requests would take longer, the more of them run.
        held = request.consumer.held
        held[request.state] -= 1
        held[state] += 1
        request.state = state

    def _remove(self, consumer: QueueConsumer) -> None:
        self.open.remove(consumer)
        if any(consumer.held.values()):
            self._closed.add(consumer)

    def _surplus(self) -> int:
        """How many requests more than allowed may arrive or wait, once the settling ones are settled. Negative:
        consumers are missing."""
        consumers = [consumer for consumer in self.open if not consumer.for_batches]
        # A request that was set aside uses up the prefetch of its consumer, although it does not run.
        can_come = sum(consumer.prefetch - consumer.held[HeldState.SET_ASIDE] for consumer in consumers)
        if self._limit is not None:
            return can_come - self._limit
        running = sum(consumer.held[HeldState.RUNNING] for consumer in consumers)
        waiting_of_closed = sum(c.held[HeldState.WAITING] for c in self._closed if not c.for_batches)
        # One may wait beside those that run; each free slot adds one that begins at once.
        return can_come - running + waiting_of_closed - 1 - self._free_slots()

    def _superfluous(self, settling: HeldRequest) -> QueueConsumer | None:
        """The consumer to close when `settling` is settled: its own, unless that one has a prefetch above 1."""
        if self._limit is None or (settling.consumer.prefetch == 1 and self._limit != 1):
            return settling.consumer if settling.consumer in self.open else None
        # The first one has the large prefetch of the queue: without it the worker would fetch one request at a time.
        spare = [one for one in self.open[1:] if not one.held[HeldState.SET_ASIDE] and not one.for_batches]
        return spare[-1] if spare else None

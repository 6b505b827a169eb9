"""The state of one request in the worker, from its delivery to its acknowledgement. Used on the event loop only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from osrdyne.amqp import Delivery
from osrdyne.protocol.messages import Request
from osrdyne_worker.app.call import Call
from osrdyne_worker.requests.data_versions import LoadedData
from osrdyne_worker.requests.scheduling.prefetch import HeldRequest
from osrdyne_worker.requests.scheduling.priorities import PriorityLevel
from osrdyne_worker.runtime.connection import BrokerConnection


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SETTLING = "settling"
    """Its outcome is decided; it can no longer be interrupted."""


class Interruption(StrEnum):
    """Why the work on a request was stopped."""

    EXPIRED = "expired"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    """This worker stops or pauses: RabbitMQ delivers the request again later, or to another worker."""
    LOST = "lost"
    """Its channel is closed: RabbitMQ has requeued it already, and no answer could be acknowledged."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A request in this worker. The processor drives it; it can be interrupted once."""

    delivery: Delivery = field(repr=False)
    request: Request = field(repr=False)
    call: Call = field(repr=False)
    broker: BrokerConnection = field(repr=False)
    group_id: str
    priority: int
    received_at: float
    level: PriorityLevel | None = None
    held: HeldRequest | None = None
    started: bool = False
    """Its task has begun to run."""
    is_suspect: bool = False
    """An earlier worker may have died because of it: it runs last, and alone."""
    waits: bool = True
    """Its priority level counts it as waiting."""
    events: int = 0
    """The number of its events, which it takes from the budget of the worker."""
    probe: str | None = None
    """The id of the probe for which it was taken."""
    is_reported: bool = False
    is_settled: bool = False
    """It was acknowledged or returned to RabbitMQ."""
    will_be_retried: bool = False
    """It failed and is being published for its next attempt: a cancel is meant for that attempt."""
    has_slot: bool = False
    paused: bool = False
    """Its answer is a stream that waits for credit, and it has given its slot back meanwhile."""
    answer_refused: str | None = None
    """Why RabbitMQ does not take its answer (`WAITING_REASONS`), while that is tried again."""
    waits_to_answer: bool = False
    """Its answer waits for room in the reply queue, and others may run meanwhile."""
    in_handler: bool = False
    """Its handler runs; after an interruption until the handler ends, although the request is already settled."""
    is_abandoned: bool = False
    """It was interrupted, and its slot is free for another request although its handler runs on."""
    batch_size: int = 0
    """The number of requests in the batch in which it runs; 0 outside of batches. The batch has the slot."""
    settling: asyncio.Future[None] | None = field(default=None, repr=False)
    """The task that settles an interrupted request while its handler may still run."""
    data: LoadedData | None = None
    """The data that it uses, once its handler has begun."""
    waits_for_data: bool = False
    """It waits for a reload."""
    data_reloaded: bool = False
    """Its handler has run again because the data had changed."""
    phase: Phase = Phase.WAITING
    interruption: Interruption | None = None
    task: asyncio.Future[None] | None = field(default=None, repr=False)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    progress: set[asyncio.Future[None]] = field(default_factory=set, repr=False)
    _fingerprint: str | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """Its name in reports. Computed on first use: most requests are never named."""
        if self._fingerprint is None:
            self._fingerprint = self.delivery.fingerprint()
        return self._fingerprint

    @property
    def has_run(self) -> bool:
        """Whether its handler, or a reload for it, has begun: only then it can be why this worker ends."""
        return self.in_handler or self.waits_for_data or self.data is not None

    def interrupt(self, reason: Interruption) -> bool:
        """Stop the work on it; False if it is being settled or was interrupted before."""
        if self.phase is Phase.SETTLING or self.interruption is not None:
            return False
        # Before the task is cancelled: it distinguishes an interruption from the end of the worker by this field.
        self.interruption = reason
        # The handler sees this at its next check; a thread cannot be interrupted in any other way.
        self.call.cancel()
        # A task that has not started would skip its clean-up: it checks `interruption` when it starts.
        if self.task is not None and self.started:
            self.task.cancel()
        return True

    def claim(self) -> bool:
        """Begin to settle it; False if another task already does. From then on it cannot be interrupted."""
        if self.phase is Phase.SETTLING:
            return False
        # No await between the check and the change: exactly one task settles the request.
        self.phase = Phase.SETTLING
        return True

    def classify(self, *, in_batch: bool) -> None:
        """Note whether it will run in a batch."""
        if self.held is not None:
            self.held.classify(in_batch=in_batch)

    def begin(self) -> None:
        """Note that it has a slot."""
        self._end_wait()
        if self.held is not None:
            # The prefetch may open a consumer for the next request.
            self.held.begin()

    def set_aside(self) -> None:
        """Let others go first, also those that arrive later."""
        self._end_wait()
        if self.held is not None:
            self.held.set_aside()

    def leave(self) -> None:
        """Note that it has left the worker."""
        self._end_wait()
        if self.held is not None:
            self.held.leave()
        if self.level is not None:
            # A lower level that waits for this queue checks it again: RabbitMQ may deliver the next request now.
            self.level.settled()

    def _end_wait(self) -> None:
        if self.waits and self.level is not None:
            # Once for each request: otherwise the level would count too few waiting requests.
            self.level.begun()
        self.waits = False

    async def ack(self) -> None:
        await self._make_room()
        # After `_make_room`: RabbitMQ may deliver the next request as soon as it has the acknowledgement.
        await self.delivery.ack()
        self.is_settled = True

    async def nack(self) -> None:
        """Requeue it; this does not count as a failed delivery."""
        await self._make_room()
        await self.delivery.nack(requeue=True)
        self.is_settled = True

    async def reject(self, *, requeue: bool = True) -> None:
        """Requeue it as a failed delivery, or dead-letter it."""
        await self._make_room()
        await self.delivery.reject(requeue=requeue)
        self.is_settled = True

    async def _make_room(self) -> None:
        if self.held is not None:
            await self.held.settle()

    def disarm(self) -> None:
        """Cancel its timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

"""What may still be in the queues of higher classes when a request of a lower one could run.

RabbitMQ hands over the next request of a class only after the last one was acknowledged, so that for a moment a class
seems empty that is not. Before a lower class runs, the queues of the higher ones are asked. A queue that cannot be
consumed holds nobody up. Kept by the intakes, read by the slots.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import QueueName

NEWS_TIMEOUT = 0.5
"""How long a delivery that must be on its way is waited for before the queue is asked again, seconds."""
MAX_SILENCE = 6
"""How often in succession a queue may be asked and not answer before lower classes go on without it."""


class Backlog:
    """What is known of one class.

    `ask` tells how many requests its queue holds that have not come yet; None when the queue did not say.
    """

    def __init__(self, clock: Clock) -> None:
        self.rank = 0
        self._ask: Callable[[], Awaitable[int | None]] | None = None
        self._wanted = False
        self._reachable = False
        self._empty = False
        self._asking = False
        self._waiting = 0
        self._silence = 0
        self._news = Wakeup(clock)

    @property
    def blocks(self) -> bool:
        """Whether it may hold a request that has not come."""
        return self._wanted and self._reachable and (self._asking or not self._empty)

    def expect(self, rank: int) -> None:
        """Its queue is about to be consumed."""
        self.rank = rank
        self._wanted, self._reachable, self._empty, self._ask = True, True, False, None

    def attach(self, rank: int, ask: Callable[[], Awaitable[int | None]]) -> None:
        """Its queue is consumed now."""
        self.expect(rank)
        self._ask = ask
        self._news.set()

    def miss(self) -> None:
        """Its queue does not exist, or cannot be consumed."""
        self._reachable = False
        self._news.set()

    def detach(self) -> None:
        """Its queue is not consumed any more."""
        self._wanted, self._ask = False, None
        self._news.set()

    def came(self) -> None:
        """A request of it has come: there may be more behind it."""
        self._waiting += 1
        self._silence = 0
        self._reachable, self._empty = True, False
        self._news.set()

    def begin(self) -> None:
        """A request of it waits no more: it runs, is put aside, or has left without a run."""
        self._waiting -= 1

    def settled(self) -> None:
        """A request of it has left this worker: another one may come."""
        self._news.set()

    async def look(self) -> None:
        """Find out more, or wait a moment for news."""
        if self._waiting == 0 and self._ask is not None and await self._is_empty(self._ask):
            return
        await self._news.wait(NEWS_TIMEOUT)

    async def _is_empty(self, ask: Callable[[], Awaitable[int | None]]) -> bool:
        """Whether there is nothing to wait for. What was handed over before the answer has come before it."""
        self._empty = True  # until something comes
        self._asking = True  # and while nobody knows, it blocks
        try:
            ready = await ask()
        except BrokerError:
            self._reachable = False
            return True
        finally:
            self._asking = False
        self._silence = self._silence + 1 if ready is None else 0
        self._reachable = self._silence < MAX_SILENCE
        if ready != 0:
            self._empty = False
        return self._empty or not self._reachable


class Backlogs:
    """All classes of a worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_queue: dict[QueueName, Backlog] = {}

    def of(self, queue: QueueName) -> Backlog:
        return self._by_queue.setdefault(queue, Backlog(self._clock))

    def block(self, rank: int) -> bool:
        """Whether a class above `rank` may hold a request that has not come."""
        return any(backlog.blocks for backlog in self._by_queue.values() if backlog.rank < rank)

    async def look(self, rank: int) -> None:
        """Find out about the highest class that blocks."""
        blocking = [backlog for backlog in self._by_queue.values() if backlog.rank < rank and backlog.blocks]
        if blocking:
            await min(blocking, key=lambda backlog: backlog.rank).look()

"""The order in which messages enter a queue, also when a publish is tried again. Used by forwarder and expiry sweeper.

Requests are published without waiting for the confirms of those before them. When a publish is refused or not
confirmed, the requests behind it wait until it is in its queue; otherwise they would overtake it. Publishes that were
already sent behind it cannot be cancelled: nearly always they fail for the same reason, and then all of them are tried
again in their order. This module publishes nothing itself.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from osrdyne.protocol.names import Key


class PublishOrder:
    """The tickets of every queue that messages are being published to: the queue of a group at one priority level."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Key, int | None], _Line] = {}

    def enter(self, key: Key, priority: int | None) -> Ticket:
        """A ticket behind all tickets of the queue; use it in a `with` statement, which returns it at the end."""
        queue = (key, priority)
        line = self._lines.get(queue)
        if line is None:
            # Exists only while it has tickets: keys come and go, and nothing else would remove their lines.
            line = self._lines[queue] = _Line()
        return Ticket(self, queue, line)

    def __len__(self) -> int:
        return len(self._lines)

    def close(self, queue: tuple[Key, int | None]) -> None:
        del self._lines[queue]


class _Line:
    """The tickets of one queue in their order, those that hold the others back, and those that wait, called or not."""

    def __init__(self) -> None:
        self.tickets: dict[Ticket, None] = {}
        self.holding_back: set[Ticket] = set()
        self.waiting: dict[Ticket, asyncio.Event] = {}

    @property
    def first(self) -> Ticket:
        return next(iter(self.tickets))

    def may_publish(self, ticket: Ticket) -> bool:
        """Whether the ticket has its turn. A new ticket comes after waiting ones, also after those that were called."""
        # After a failure only the first ticket publishes: what is behind it would overtake it.
        if self.holding_back:
            return self.first is ticket
        # Without failures publishes of one queue overlap: RabbitMQ keeps the order of one channel.
        return next(iter(self.waiting), ticket) is ticket

    def call_next(self) -> None:
        """Wake the ticket whose turn it is: the first of the queue, or, without failures, the waiting ones in turn."""
        if self.waiting:
            called = self.waiting.get(self.first if self.holding_back else next(iter(self.waiting)))
            if called is not None:
                called.set()

    def leave(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        self.holding_back.discard(ticket)
        self.waiting.pop(ticket, None)
        # The next ticket may have waited for this one, which has published, failed for good or been cancelled.
        self.call_next()


class Ticket:
    """The turn of one message among those published to the same queue."""

    def __init__(self, order: PublishOrder, queue: tuple[Key, int | None], line: _Line) -> None:
        self._order = order
        self._queue = queue
        self._line = line
        self._is_cancelled = False
        # A dict as an ordered set: the order in which tickets are drawn is the order in the queue.
        line.tickets[self] = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._line.leave(self)
        if not self._line.tickets:
            # No ticket is left: the next message of the queue begins a new line, with nothing held back.
            self._order.close(self._queue)

    @property
    def may_publish(self) -> bool:
        """Whether `turn` returns at once."""
        return self._line.may_publish(self)

    def cancel(self) -> None:
        """End a wait for the turn: `turn` returns False."""
        self._is_cancelled = True
        if (called := self._line.waiting.get(self)) is not None:
            called.set()

    async def turn(self) -> bool:
        """Wait until the message may be published: at once without failures in the line, else when it is the first.
        False after `cancel`; then return the ticket."""
        line = self._line
        while not self._is_cancelled and not line.may_publish(self):
            called = line.waiting.setdefault(self, asyncio.Event())
            # It may have been called before another ticket failed; that call is void.
            called.clear()
            await called.wait()
        # It has waited, so others may wait behind it. Each wakes the next, and they publish in their order.
        if line.waiting.pop(self, None) is not None:
            line.call_next()
        return not self._is_cancelled

    def hold_back(self) -> None:
        """Hold back every ticket behind this one until it is returned: its publish must be tried again, or it stands
        for work on the queue itself."""
        self._line.holding_back.add(self)

"""The interface of the driver of pooled workers to the leader's term.

The driver outlives a term, a link belongs to one. `osrdyne.pool.workers.pooled` implements it over RabbitMQ; the tests
have one in memory that loses, doubles and reorders messages.
"""

from __future__ import annotations

from typing import Protocol

from osrdyne.drivers.base import WorkerSpec
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import Question


class ProcessLink(Protocol):
    """Sends questions to processes, and makes what a new process needs. The reports of the processes come through
    `PooledDriver.take_state`."""

    @property
    def term(self) -> int:
        """The leader's term. From the first question that it accepts, a process ignores the leaders of lower terms."""
        ...

    async def send(self, process: WorkerId, question: Question) -> bool:
        """Send a question; it may get lost. Returns whether RabbitMQ has accepted it."""
        ...

    async def confirm(self, *, since: float | None = None) -> None:
        """Return if the leader still leads, and led after `since` (monotonic). Raises `LeadershipLostError`."""
        ...

    async def make_process(self, slot: int) -> WorkerSpec:
        """The specification of a new process, with credentials of its own. Raises `BrokerError`."""
        ...

    def release_process(self, process: WorkerId) -> None:
        """Release the credentials of a process that has ended or did not start. Does not wait and does not fail."""
        ...

    def note_assigned(self, seconds: float) -> None:
        """A worker was assigned to a process, so many seconds after the driver was asked to start it."""
        ...

"""The interface between the pooled driver and the leader's term.

The driver outlives a term; each link belongs to one term. `osrdyne.pool.workers.pooled` implements it over RabbitMQ;
the tests have an in-memory link that loses, duplicates and reorders messages.
"""

from __future__ import annotations

from typing import Protocol

from osrdyne.drivers.base import WorkerSpec
from osrdyne.drivers.pooled.placement import ProcessSettings
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import Question


class ProcessLink(Protocol):
    """Sends questions to processes, and creates the specification and credentials of new ones. Reports of processes
    arrive through `PooledDriver.take_state`."""

    @property
    def term(self) -> int:
        """The leader's term. Once a process has accepted a question of this term, it ignores leaders of lower terms."""
        ...

    async def send(self, process: WorkerId, question: Question) -> bool:
        """Send a question, which may get lost. Returns whether RabbitMQ has accepted it."""
        ...

    async def confirm(self, *, since: float | None = None) -> None:
        """Return if the leader still leads, and led after `since` (monotonic). Raises `LeadershipLostError`."""
        ...

    async def make_process(self, slot: int, settings: ProcessSettings) -> WorkerSpec:
        """The specification of a new process with these settings and its own credentials. Raises `BrokerError`."""
        ...

    def release_process(self, process: WorkerId) -> None:
        """Release the credentials of a process that has ended or did not start. Does not wait and does not fail."""
        ...

    def runs_suspect(self, worker_id: WorkerId) -> bool:
        """Whether the worker has reported that it runs a request which may have ended an earlier worker."""
        ...

    def loads(self, worker_id: WorkerId) -> bool:
        """Whether the worker has reported that it loads its data, and not yet that it is ready."""
        ...

    def note_assigned(self, seconds: float) -> None:
        """Record that a worker was assigned to a process, and how many seconds after the call of `start`."""
        ...

"""The log of telemetry, for the ingress and `explain`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import Refusal
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status
from osrdyne.protocol.telemetry import partition_of


@dataclass(frozen=True, slots=True)
class Log:
    """The log of a pool. `name`: None for a pool without one. `partitions`: 0 while it cannot be written."""

    name: str | None = None
    partitions: int = 0

    def partition(self, key: Key) -> int:
        """The partition of a key. Only for a log that can be written."""
        return partition_of(key, self.partitions)

    def refuse(self, routed: RoutedRequest) -> Refusal | None:
        """Why a write is refused; None if it is not."""
        if routed.log != self.name:
            known = "has no log" if self.name is None else f"has the log {self.name!r}"
            detail = (
                f"The route {routed.route} writes to the log {routed.log!r}, and the pool {known} (telemetry.name)."
            )
            return Refusal(Status.REJECTED, detail)
        if not self.partitions:
            detail = f"The log {self.name!r} cannot be written: `osrdyne doctor` names the queue that is not a stream."
            return Refusal(Status.REJECTED, detail)
        return None

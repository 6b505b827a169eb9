"""Cancels of requests that may wait for another attempt, kept by the leader as long as such a wait may last.

A request that waits is in no worker, and the worker that tried it may end meanwhile. So a worker of its group that
comes later is told of the cancel, and the ingress answers the request itself if it comes back there. A new leader knows
of none. Filled by the cancel processor; bounded, the oldest is forgotten first. No I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from osrdyne.aio.clock import Clock
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, WorkerId

MAX_KEPT = 1000


class RequestName(NamedTuple):
    """Knowing both is the right to cancel a request (docs/protocol.md)."""

    correlation_id: str
    reply_to: str


@dataclass(slots=True)
class _Kept:
    key: Key
    until: float
    told: set[WorkerId] = field(default_factory=set)


class KeptCancels:
    """The cancels of one term. `key` is the one that the canceller named."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[RequestName, _Kept] = OrderedDict()

    def keep(self, name: RequestName, key: Key, *, seconds: float) -> None:
        """The request may wait for so long."""
        if seconds <= 0:
            return
        self._kept[name] = _Kept(key, self._clock.monotonic() + seconds)
        self._kept.move_to_end(name)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def forget(self, request: Request) -> None:
        """This one is new: a cancel of its name was of another one."""
        if self._kept and (name := _name_of(request)) is not None:
            self._kept.pop(name, None)

    def was_cancelled(self, request: Request) -> bool:
        """Whether this one, which was accepted before, was cancelled since."""
        kept = self._kept.get(name) if (name := _name_of(request)) is not None else None
        return kept is not None and self._clock.monotonic() <= kept.until

    def untold(self, worker: WorkerId, concerns: Callable[[Key], bool]) -> list[tuple[RequestName, float]]:
        """The cancels that a worker has not been told of, and how many seconds each is still to be kept."""
        now = self._clock.monotonic()
        for name in [name for name, one in self._kept.items() if one.until < now]:
            del self._kept[name]
        return [
            (name, one.until - now) for name, one in self._kept.items() if worker not in one.told and concerns(one.key)
        ]

    def note_told(self, name: RequestName, worker: WorkerId) -> None:
        """The worker has heard of it."""
        if name in self._kept:
            self._kept[name].told.add(worker)


def _name_of(request: Request) -> RequestName | None:
    if not request.correlation_id or not request.reply_to:
        return None
    return RequestName(request.correlation_id, request.reply_to)

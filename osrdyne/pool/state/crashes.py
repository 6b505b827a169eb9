"""How workers died in this term, and which requests were running in them: the evidence of the poison inventory.

`WorkerActions` writes it, the dead letter responder reads it. It is kept in memory and bounded: deaths of an earlier
term, and those that many others have followed, are unknown. Nothing is decided from it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from osrdyne.aio.watch import WatchCell
from osrdyne.protocol.names import Key

MAX_DEATHS = 1000
MAX_DEATHS_OF_KEY = 50


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker that ended by itself while it ran requests. `ended_with`: exit code or signal; `said`: its own reason;
    `at`: seconds since the epoch; `requests`: fingerprints of what was running in it."""

    worker_id: str
    ended_with: str
    said: str | None
    at: float
    log_lines: tuple[str, ...]
    requests: tuple[str, ...]


class DeathRegister:
    """The latest deaths of a term."""

    def __init__(self) -> None:
        self._deaths: deque[tuple[Key, WorkerDeath]] = deque(maxlen=MAX_DEATHS)
        self.count: WatchCell[int] = WatchCell(0)
        """How many there were so far."""

    def note(self, key: Key, death: WorkerDeath) -> None:
        """Keep a death; the oldest of the same key makes room, so that one key cannot push out the others."""
        same_key = [known for known in self._deaths if known[0] == key]
        if len(same_key) >= MAX_DEATHS_OF_KEY:
            self._deaths.remove(same_key[0])
        self._deaths.append((key, death))
        self.count.set(self.count.value + 1)

    def of_request(self, key: Key, fingerprint: str) -> tuple[WorkerDeath, ...]:
        """The deaths that a request was there for, the earliest first."""
        return tuple(death for known, death in self._deaths if known == key and fingerprint in death.requests)

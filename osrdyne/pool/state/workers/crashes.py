"""Ends of workers in this term: how workers died, which requests ran in them, and which requests are refused since.

`WorkerActions` writes the registers. The dead letter responder reads the deaths as evidence for the poison inventory.
Refused texts reach new workers through their environment and running ones through a control message. The registers
are kept in memory and bounded: a new leader starts without them, and RabbitMQ's delivery limit still holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import WatchCell
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath

MAX_DEATHS = 1000
MAX_DEATHS_OF_KEY = 50
MAX_REQUESTS = 10_000


class FailedDeliveries(NamedTuple):
    """What is known about failed deliveries of a request that RabbitMQ has counted.

    `caused`: it ran when its worker died. `innocent`: it did not run, or its worker lives on.
    """

    caused: int = 0
    innocent: int = 0


class DeathRegister:
    """The latest deaths of a term, each with the fingerprints of the requests that ran in the worker; and what is known
    about failed deliveries of requests."""

    def __init__(self) -> None:
        self._deaths: deque[tuple[Key, WorkerDeath, Collection[str]]] = deque(maxlen=MAX_DEATHS)
        self._failed: dict[tuple[Key, str], FailedDeliveries] = {}
        self._homes: dict[tuple[Key, str], tuple[frozenset[str], int]] = {}
        self.count: WatchCell[int] = WatchCell(0)  # How many deaths and returns there were so far.

    def note(self, key: Key, death: WorkerDeath, requests: Collection[str]) -> None:
        """Keep a death. The oldest of the same key makes room, so that one key cannot push out the others."""
        same_key = [known for known in self._deaths if known[0] == key]
        if len(same_key) >= MAX_DEATHS_OF_KEY:
            self._deaths.remove(same_key[0])
        self._deaths.append((key, death, requests))

    def of_request(self, key: Key, fingerprint: str) -> tuple[WorkerDeath, ...]:
        """The deaths that happened while this request ran, the earliest first."""
        return tuple(
            replace(death, others=sum(other != fingerprint for other in requests))
            for known, death, requests in self._deaths
            if known == key and fingerprint in requests
        )

    def note_end(self, key: Key, home: str, *, ran: Collection[str], waiting: Collection[str]) -> None:
        """Record the failed deliveries of requests that ran or waited in a worker which has died; `home`: its process.

        If several workers of the key die with one process, RabbitMQ may deliver what the first one had to the next one,
        which takes no requests any more, and count that as well.
        """
        before, ends = self._homes.pop((key, home), (frozenset[str](), 0))
        here = frozenset((*ran, *waiting))
        self._homes[key, home] = (before | here, ends + 1)
        for request in before | here:
            passed_on = 1 if request not in here else 0 if request in before else ends
            innocent = passed_on + (request in waiting and request not in ran)
            self._count(key, request, FailedDeliveries(caused=int(request in ran), innocent=innocent))
        while len(self._homes) > MAX_DEATHS:
            del self._homes[next(iter(self._homes))]
        self.count.set(self.count.value + 1)

    def note_returned(self, key: Key, requests: Iterable[str]) -> None:
        """Record an innocent return of each of these requests."""
        for request in dict.fromkeys(requests):  # once, if several equal requests return: each has one count more
            self._count(key, request, FailedDeliveries(innocent=1))
        self.count.set(self.count.value + 1)

    def take_failed(self, key: Key, fingerprint: str) -> FailedDeliveries:
        """What is known about failed deliveries of this request since the last call."""
        return self._failed.pop((key, fingerprint), FailedDeliveries())

    def _count(self, key: Key, request: str, more: FailedDeliveries) -> None:
        known = self._failed.pop((key, request), FailedDeliveries())
        self._failed[key, request] = FailedDeliveries(known.caused + more.caused, known.innocent + more.innocent)
        while len(self._failed) > MAX_REQUESTS:  # those that failed last are kept
            del self._failed[next(iter(self._failed))]


MAX_ENDED_KEYS = 500
MAX_ENDED_SLOTS = 10
PREVIOUS_LINES = 100  # Log lines that are kept of an ended worker.
MAX_LINE = 4000  # Characters of each of them.


class EndedWorkers:
    """The last worker of each slot that has ended in this term, for whatever reason, with its last log lines, which its
    driver may have deleted. If there are too many keys, those whose workers ended last are kept."""

    def __init__(self) -> None:
        self._ended: dict[Key, dict[int, WorkerDeath]] = {}

    def note(self, key: Key, slot: int, end: WorkerDeath) -> None:
        slots = self._ended.pop(key, {})
        slots.pop(slot, None)
        slots[slot] = replace(end, log_lines=tuple(line[:MAX_LINE] for line in end.log_lines[-PREVIOUS_LINES:]))
        if len(slots) > MAX_ENDED_SLOTS:
            del slots[next(iter(slots))]
        self._ended[key] = slots
        if len(self._ended) > MAX_ENDED_KEYS:
            del self._ended[next(iter(self._ended))]

    def of_key(self, key: Key) -> list[WorkerDeath]:
        """The ended workers, the earliest end first."""
        return list(self._ended.get(key, {}).values())


# Seconds for which a text is refused whose handler has blocked the event loop of one worker: its request comes back at
# once, and another worker must not be blocked by it.
BLOCKED_TIME = 60.0
MAX_OF_KEY = 100
MAX_KEYS = 1000


class PoisonTexts:
    """Texts (path and body) of requests that ended two workers, which workers refuse for `seconds`; 0: none is refused.

    Either the second worker died while it ran nothing else, or both ended because the handler could not be cancelled.
    A text whose handler blocked an event loop is refused for a shorter time after the first worker.
    """

    def __init__(self, clock: Clock, *, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._until: dict[Key, dict[str, float]] = {}
        # Texts whose handler was stuck in one worker, and until when a second one counts.
        self._stuck: dict[Key, dict[str, float]] = {}

    def note(self, key: Key, text: str) -> bool:
        """Refuse a text from now on; the oldest texts make room. False if this pool refuses no texts."""
        if self._seconds <= 0:
            return False
        self._put(self._until, key, text, self._seconds)
        return True

    def note_blocked(self, key: Key, text: str) -> bool:
        """Refuse a text whose handler has blocked the event loop: for `BLOCKED_TIME` the first time, because that may
        pass. False if this pool refuses no texts."""
        if self._seconds <= 0:
            return False
        again = self.note_stuck(key, text)
        self._put(self._until, key, text, self._seconds if again else min(BLOCKED_TIME, self._seconds))
        return True

    def note_stuck(self, key: Key, text: str) -> bool:
        """Record that a worker ended because a handler of this text did not end. True if it is the second worker within
        `seconds`."""
        until = self._stuck.get(key, {}).pop(text, None)
        if until is not None and until > self._clock.monotonic():
            return True
        self._put(self._stuck, key, text, self._seconds)
        return False

    def _put(self, kept: dict[Key, dict[str, float]], key: Key, text: str, seconds: float) -> None:
        texts = kept.pop(key, {})
        texts.pop(text, None)
        texts[text] = self._clock.monotonic() + seconds
        kept[key] = texts
        if len(texts) > MAX_OF_KEY:
            del texts[next(iter(texts))]
        if len(kept) > MAX_KEYS:
            del kept[next(iter(kept))]

    def of_key(self, key: Key) -> Mapping[str, float]:
        """The texts that are refused now, each with the seconds for which it still is."""
        now = self._clock.monotonic()
        texts = {text: until for text, until in self._until.get(key, {}).items() if until > now}
        if texts:
            self._until[key] = texts
        else:
            self._until.pop(key, None)
        return {text: round(until - now, 3) for text, until in texts.items()}

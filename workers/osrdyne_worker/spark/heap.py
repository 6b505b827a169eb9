"""A watch over the heap of the worker's JVM: it cancels a request before memory is exhausted.

`SparkSessions` starts one for each session with a JVM of its own. A JVM without memory fails in any of its threads,
also in those that Spark cannot do without; so one request is ended while the rest still works. Owns a thread; asks the
JVM every half second while a request runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osrdyne.logs import get_logger

log = get_logger(__name__)

LIMIT = "spark.osrdyne.maxHeapUse"
"""Setting of the session: the share of the heap, after a garbage collection, from which on requests are cancelled."""
DEFAULT_LIMIT = 0.75
"""G1 keeps a tenth of the heap in reserve and needs room for new objects: above four fifths it does little else than
collect, and the query that fills the heap hardly gets on."""
INTERVAL = 0.5
COLLECT_SHARE = 0.1
"""The share of time, at most, that collections take which the watch asks for."""
YOUNG = 0.5
"""Seconds that a request must have run to be cancelled while an older one runs: most of those are harmless."""
AFTER_CANCEL = 1.5
"""Seconds for tasks of a cancelled request to let go of its memory after its handler has ended."""
CANCEL_TIME = 10.0
"""Seconds that a cancelled request has to end, before another one is cancelled: some cannot be cancelled."""
LEAST_EVIDENCE = 0.1
"""The share of the heap that a request must hold, as far as Spark knows, to be cancelled for that."""


@dataclass(frozen=True, slots=True)
class HeapUse:
    """Bytes of the heap in use, and the most that it may have."""

    used: int
    most: int

    @property
    def share(self) -> float:
        return self.used / self.most if self.most > 0 else 0.0


class JvmHeap:
    """The heap of a JVM, through py4j. Not its memory beans: their classes are closed to reflection."""

    def __init__(self, jvm: Any) -> None:
        self._runtime = jvm.java.lang.Runtime.getRuntime()

    def use(self) -> HeapUse:
        free = int(self._runtime.freeMemory())
        return HeapUse(int(self._runtime.totalMemory()) - free, int(self._runtime.maxMemory()))

    def collect(self) -> None:
        self._runtime.gc()


def choose(started: Mapping[str, float], held: Mapping[str, int], *, least: float, now: float) -> str | None:
    """The group to cancel: the one that holds most, if that is at least `least` bytes; else the youngest that has run
    for a moment, or the youngest of all."""
    most = max(started, key=lambda group: held.get(group, 0), default=None)
    if most is not None and held.get(most, 0) >= least:
        return most
    grown = {group: since for group, since in started.items() if now - since >= YOUNG} or started
    return max(grown, key=lambda group: grown[group], default=None)


def nothing_known(groups: Sequence[str]) -> Mapping[str, int]:
    return {}


class HeapWatch:
    """Watches one heap while groups run. Thread-safe.

    `cancel(group, reason)` and `held_by(groups)`, bytes that Spark knows to be held by each, are called in the watch's
    thread.
    """

    def __init__(
        self,
        heap: Any,
        *,
        limit: float,
        cancel: Callable[[str, str], None],
        held_by: Callable[[Sequence[str]], Mapping[str, int]] = nothing_known,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heap = heap
        self._limit = limit
        self._cancel = cancel
        self._held_by = held_by
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._started: dict[str, float] = {}
        self._cancelled: set[str] = set()
        self._busy = threading.Event()
        self._closed = False
        self._not_before = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="heap-watch", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._busy.set()

    def began(self, group: str) -> None:
        with self._lock:
            self._started[group] = self._monotonic()
        self._busy.set()

    def ended(self, group: str) -> None:
        with self._lock:
            self._started.pop(group, None)
            if group in self._cancelled:  # its tasks may hold memory a little longer
                self._cancelled.discard(group)
                self._not_before = self._monotonic() + AFTER_CANCEL
            if not self._started:
                self._busy.clear()

    def look(self) -> None:
        """Cancel a request if the heap is nearly full of what is in use. One look of the thread."""
        now = self._monotonic()
        if now < self._not_before:
            return
        use = self._heap.use()
        if use.share < self._limit:
            return
        self._heap.collect()  # until then nothing says how much of it is garbage
        after = self._heap.use()
        self._not_before = self._monotonic() + (self._monotonic() - now) / COLLECT_SHARE
        if after.share < self._limit:
            return
        with self._lock:
            running = {group: since for group, since in self._started.items() if group not in self._cancelled}
        held = self._held(list(running)) if len(running) > 1 else {}
        with self._lock:
            running = {group: since for group, since in running.items() if group in self._started}
            chosen = choose(running, held, least=LEAST_EVIDENCE * after.most, now=now)
            if chosen is None:
                return
            self._cancelled.add(chosen)
            # Until it has ended nothing says whether that was enough.
            self._not_before = self._monotonic() + CANCEL_TIME
        log.warning("a request is cancelled because the heap is nearly full", group=chosen, used=after.used,
                    most=after.most, held=held.get(chosen))  # fmt: skip
        self._cancel(chosen, out_of_memory(after))

    def _held(self, groups: list[str]) -> Mapping[str, int]:
        try:
            return self._held_by(groups)
        except Exception as error:  # evidence is worth no more than that
            log.warning("spark does not say which request holds memory", reason=type(error).__name__)
            return {}

    def _run(self) -> None:
        while self._busy.wait() and not self._closed:
            try:
                self.look()
            except Exception as error:  # a JVM that ends, or has no memory left for an answer
                if not self._closed:
                    log.warning("the heap of the JVM cannot be read", reason=type(error).__name__)
                time.sleep(AFTER_CANCEL)
            time.sleep(INTERVAL)


def out_of_memory(use: HeapUse) -> str:
    return (
        f"The request was cancelled because the memory of its worker was nearly exhausted "
        f"({use.used / 2**20:,.0f} of {use.most / 2**20:,.0f} MiB of Spark's heap): let it use less data at once, or "
        "raise spark.driver.memory."
    )

"""Watches the heap of the worker's JVM, and cancels a request or a load of data before memory is exhausted.

A JVM without memory may fail in any thread, including threads that Spark depends on. So the watch cancels one request
while the others still work. `SparkSessions` starts a watch for each session that has its own JVM. The watch is a thread
that polls the JVM every half second while a request runs, or data is loaded.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osrdyne.logs import get_logger

log = get_logger(__name__)

LIMIT = "spark.osrdyne.maxHeapUse"
"""Setting of the session: requests are cancelled if more than this share of the heap is in use after collections."""
DEFAULT_LIMIT = 0.75
"""G1 reserves a tenth of the heap and needs room for new objects: above four fifths it spends most of its time on
collections, and the query that fills the heap makes little progress."""
INTERVAL = 0.5
CLEANING_TIME = 0.25
"""Seconds for Spark's context cleaner to remove what a collection has shown to be unused."""
CLEANED = 0.01
"""The share of the heap that one more collection must free for another one to be worth its time."""
COLLECT_SHARE = 0.1
"""The maximum share of time for the collections that the watch triggers."""
YOUNG = 0.5
"""Seconds that a request must have run to be cancelled before older ones: most younger ones are harmless."""
AFTER_CANCEL = 1.5
"""Seconds for tasks of a cancelled request to release its memory after its handler has ended."""
CANCEL_TIME = 10.0
"""Seconds for a cancelled request to end before another one is cancelled: some requests cannot be cancelled."""
LIVE_INTERVAL = 60.0
LIVE_SHARE = 0.01
MIN_EVIDENCE = 0.1
"""The share of the heap that a request must hold, as far as Spark knows, to be chosen because of it."""


@dataclass(frozen=True, slots=True)
class HeapUse:
    """Bytes of the heap in use, and its maximum size."""

    used: int
    maximum: int

    @property
    def share(self) -> float:
        return self.used / self.maximum if self.maximum > 0 else 0.0


class JvmHeap:
    """The heap of a JVM, through py4j. Memory beans cannot be used: their classes are closed to reflection."""

    def __init__(self, jvm: Any) -> None:
        self._runtime = jvm.java.lang.Runtime.getRuntime()

    def use(self) -> HeapUse:
        free = int(self._runtime.freeMemory())
        return HeapUse(int(self._runtime.totalMemory()) - free, int(self._runtime.maxMemory()))

    def collect(self) -> None:
        self._runtime.gc()


def use_after_collection(heap: Any, *, enough: float = 0.0, sleep: Callable[[float], None] = time.sleep) -> HeapUse:
    """Collect until a further collection frees little, or the share in use is below `enough`; return the use.

    Spark removes a broadcast variable or a shuffle only after a collection has shown that nothing refers to it: the
    next collection frees its memory. Many small joins leave hundreds of MiB in this state.
    """
    heap.collect()
    after: HeapUse = heap.use()
    while after.share >= enough:
        before = after
        sleep(CLEANING_TIME)
        heap.collect()
        after = heap.use()
        if before.share - after.share < CLEANED:
            break
    return after


class LiveHeap:
    """The use of a heap without its garbage. Triggers collections first if half of the heap seems to be in use, at
    most once in `LIVE_INTERVAL` seconds and for at most `LIVE_SHARE` of the time."""

    def __init__(
        self,
        heap: Any,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._heap = heap
        self._monotonic = monotonic
        self._sleep = sleep
        self._not_before = -math.inf
        self._live: HeapUse | None = None

    @property
    def live(self) -> int | None:
        """Bytes in use after the last collection that this object has triggered; None before the first one."""
        return None if self._live is None else self._live.used

    def use(self) -> HeapUse:
        """The smaller of the current use and the use after the last collection, if that is recent enough."""
        now: HeapUse = self._heap.use()
        since = self._monotonic()
        if now.share >= 0.5 and since >= self._not_before:
            now = self._live = use_after_collection(self._heap, sleep=self._sleep)
            ended = self._monotonic()
            self._not_before = ended + max(LIVE_INTERVAL, (ended - since) / LIVE_SHARE)
        return (
            now if self._live is None or since >= self._not_before else min(now, self._live, key=lambda use: use.used)
        )


def choose_group(
    started: Mapping[str, float],
    held: Mapping[str, int],
    *,
    minimum: float,
    now: float,
    loads: Collection[str] = (),
) -> str | None:
    """The group to cancel: the one that holds most memory, if that is at least `minimum` bytes. Otherwise the youngest
    one that has run for `YOUNG` seconds, or the youngest of all; one of `loads`, which load data, before requests."""
    largest = max(started, key=lambda group: held.get(group, 0), default=None)
    if largest is not None and held.get(largest, 0) >= minimum:
        return largest
    older = {group: since for group, since in started.items() if now - since >= YOUNG} or started
    # Spark does not attribute cached data to groups. A load fills the heap with it; a request releases its memory.
    older = {group: since for group, since in older.items() if group in loads} or older
    return max(older, key=lambda group: older[group], default=None)


def unknown_memory(groups: Sequence[str]) -> Mapping[str, int]:
    return {}


class HeapWatch:
    """Watches one heap while groups run. Thread-safe.

    The watch calls `cancel(group, reason)` and `held_by(groups)` in its thread; the latter returns the bytes that Spark
    knows each group to hold.
    """

    def __init__(
        self,
        heap: Any,
        *,
        limit: float,
        cancel: Callable[[str, str], None],
        held_by: Callable[[Sequence[str]], Mapping[str, int]] = unknown_memory,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._heap = heap
        self._limit = limit
        self._sleep = sleep
        self._cancel = cancel
        self._held_by = held_by
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._started: dict[str, float] = {}
        self._loads: set[str] = set()
        self._cancelled: set[str] = set()
        self._busy = threading.Event()
        self._closed = False
        self._not_before = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="heap-watch", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._busy.set()

    def began(self, group: str, *, loads: bool = False) -> None:
        """`loads`: the group loads data and is no request."""
        with self._lock:
            self._started[group] = self._monotonic()
            if loads:
                self._loads.add(group)
        self._busy.set()

    def ended(self, group: str) -> None:
        with self._lock:
            self._started.pop(group, None)
            self._loads.discard(group)
            if group in self._cancelled:  # its tasks may hold memory a bit longer
                self._cancelled.discard(group)
                self._not_before = self._monotonic() + AFTER_CANCEL
            if not self._started:
                self._busy.clear()

    def check(self) -> None:
        """Check the heap once, and cancel a request if it is nearly full after a collection."""
        now = self._monotonic()
        # A collection stops all requests of the JVM: this bounds their share of the time.
        if now < self._not_before:
            return
        if self._heap.use().share < self._limit:
            return
        after = use_after_collection(self._heap, enough=self._limit, sleep=self._sleep)
        self._not_before = self._monotonic() + (self._monotonic() - now) / COLLECT_SHARE
        if after.share < self._limit:
            return
        with self._lock:
            running = {group: since for group, since in self._started.items() if group not in self._cancelled}
        held = self._held(list(running)) if len(running) > 1 else {}
        with self._lock:
            # Some may have ended while Spark was queried: cancelling those would free nothing.
            running = {group: since for group, since in running.items() if group in self._started}
            chosen = choose_group(running, held, minimum=MIN_EVIDENCE * after.maximum, now=now, loads=self._loads)
            if chosen is None:
                return
            loads = chosen in self._loads
            # Never chosen twice: a request that does not react must not protect all others.
            self._cancelled.add(chosen)
            # Whether that was enough is known only after the request has ended.
            self._not_before = self._monotonic() + CANCEL_TIME
        log.warning(
            "heap nearly full, load cancelled" if loads else "heap nearly full, request cancelled",
            group=chosen,
            used=after.used,
            maximum=after.maximum,
            held=held.get(chosen),
        )
        self._cancel(chosen, out_of_memory(after, loads=loads))

    def _held(self, groups: list[str]) -> Mapping[str, int]:
        try:
            return self._held_by(groups)
        except Exception as error:  # the choice works without these figures
            log.warning("memory of requests unknown", reason=type(error).__name__)
            return {}

    def _run(self) -> None:
        while self._busy.wait() and not self._closed:
            try:
                self.check()
            except Exception as error:  # the JVM is ending, or has no memory left for an answer
                if not self._closed:
                    log.warning("JVM heap could not be read", reason=type(error).__name__)
                self._sleep(AFTER_CANCEL)
            self._sleep(INTERVAL)


def out_of_memory(use: HeapUse, *, loads: bool = False) -> str:
    what = "load of the data" if loads else "request"
    return (
        f"The {what} was cancelled because the memory of its worker was nearly exhausted "
        f"({use.used / 2**20:,.0f} of {use.maximum / 2**20:,.0f} MiB of Spark's heap): let it use less data at once, "
        "or raise spark.driver.memory."
    )

"""What an event costs the pool state tracker with 1,000 keys and with 100,000, and what a key weighs.

Here the floor is the tracker itself with few keys: the cost of an event must not grow with the pool. A hundred pools of
1,000 keys stand beside one of 100,000, so that both sides fetch their keys from as much memory. One small pool would
stay in the processor's caches, which it does not in a daemon (where far more work than this lies between two events),
and would show the machine instead: a bare dict of 100,000 keys alone is ten times slower then than one of 1,000.
"""

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable

from osrdyne.aio.clock import SystemClock
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.pool.state.groups.transitions import Delays
from osrdyne.protocol.activity import BUSY_INTERVAL
from osrdyne.protocol.names import Key
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure

FEW, MANY = 1_000, 100_000
EVENTS = 2_000
ROUNDS = 51
"""Many short ones, in processor time: what else the machine does then matters little."""
AT_ONCE = 100
"""Groups whose time is up together."""
DELAYS = Delays(unbind=600.0, stop=600.0)
REPORTS = DELAYS.unbind / BUSY_INTERVAL
"""What comes from a worker at work in the time after which its group would be idle."""


async def run(_: EmbeddedBroker) -> list[Figure]:
    return [
        _compare("tracker, activity of a key", Pools(MANY // FEW, FEW).activity, Pools(1, MANY).activity),
        _compare("tracker, idle and back", Pools(MANY // FEW, FEW).idle_and_back, Pools(1, MANY).idle_and_back),
        figure("tracker, weight of a key", "bytes", [Round(0.0, _weight())], Goal(600, Comparison.DIFFERENCE)),
    ]


def _compare(name: str, few: Callable[[], float], many: Callable[[], float]) -> Figure:
    return figure(name, "µs", [Round(few(), many()) for _ in range(ROUNDS)], Goal(1.5))


class HandClock(SystemClock):
    """Time that passes when the benchmark says so."""

    now = 1_000.0

    def monotonic(self) -> float:
        return self.now


class Pool:
    """A tracker with `size` keys in use, whose time would be up at even distances."""

    def __init__(self, size: int) -> None:
        self.clock = HandClock()
        self.tracker = PoolStateTracker(term=1, delays=DELAYS, clock=self.clock)
        self.changes = self.tracker.subscribe()
        self.keys = [Key(f"infra={number},timetable={number % 97}") for number in range(size)]
        self.distance = DELAYS.unbind / size
        for key in self.keys:
            self.clock.now += self.distance
            self.tracker.require_worker_group(key)
        self.changes.take()

    def report(self, key: Key) -> None:
        """A worker at work reports, and the timers that are up meanwhile look again."""
        self.clock.now += self.distance / REPORTS
        self.tracker.advance()
        self.tracker.require_worker_group(key)

    def end_and_require(self) -> int:
        """Groups whose time is up together become UNBOUND, and are required again. Returns how many did either."""
        self.clock.now += self.distance * AT_ONCE
        self.tracker.advance()
        ended = self.changes.take()
        for key in ended:
            self.tracker.require_worker_group(key)
        return len(ended) + len(self.changes.take())


class Pools:
    """Several pools of one size, which take turns."""

    def __init__(self, number: int, size: int) -> None:
        self._pools = [Pool(size) for _ in range(number)]
        self._turns = itertools.cycle(self._pools)
        self._at = 0

    def activity(self) -> float:
        """Microseconds that a request for a group that is up costs, and the timers that it moves.

        The keys come from all over the pools, and are not the very objects that the trackers hold: they come by wire.
        """
        events = [self._next_event() for _ in range(EVENTS)]
        began = time.thread_time()
        for pool, key in events:
            pool.report(key)
        return (time.thread_time() - began) / EVENTS * 1e6

    def _next_event(self) -> tuple[Pool, Key]:
        self._at += 7_919  # a prime: no key twice before every key once
        place, pool = divmod(self._at, len(self._pools))
        keys = self._pools[pool].keys
        return self._pools[pool], Key(keys[place % len(keys)].encode().decode())

    def idle_and_back(self) -> float:
        """Microseconds of a group's way from ACTIVE to UNBOUND by its timer, and back by a request."""
        changes, began = 0, time.thread_time()
        while changes < EVENTS:
            changes += next(self._turns).end_and_require()
        return (time.thread_time() - began) / changes * 1e6


def _weight() -> float:
    """Bytes."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        pool = Pool(MANY)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        return (after - before) / len(pool.keys)
    finally:
        tracemalloc.stop()

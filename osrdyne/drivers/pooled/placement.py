"""Which process gets a worker, and how many processes to run: pure functions of the records of the processes.

Source: docs/explanation/placement.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from osrdyne.drivers.pooled.process import Process
from osrdyne.protocol.names import Key

EMPTY_FOR = 60.0
"""Seconds after which an empty process beyond the spares ends."""


@dataclass(frozen=True, slots=True)
class PooledRules:
    """`worker.pooled`, with the time limits of the driver in seconds.

    `max_age` in seconds and `max_requests`: a process beyond these limits is replaced; None: never. `process_timeout`:
    the time in which a process must answer. `start_timeout`: the time in which a new process must be ready, and for
    which the start of a worker waits for a place. `start_attempts`: the number of consecutive processes that end before
    they are ready, after which the waiting starts fail. `stop_grace`: the time in which a process must end.
    `repeat_after`: the time after which an unanswered question is repeated.
    """

    keys_per_process: int = 50
    spares: int = 1
    max_processes: int = 8
    max_heap_used: float = 0.75
    max_age: float | None = None
    max_requests: int | None = None
    process_timeout: float = 30.0
    start_timeout: float = 300.0
    start_attempts: int = 2
    stop_grace: float = 30.0
    repeat_after: float = 1.0

    @property
    def capacity(self) -> int:
        """The maximum number of workers in all processes."""
        return self.keys_per_process * self.max_processes


def choose(processes: Iterable[Process], key: Key, rules: PooledRules, *, alone: bool) -> Process | None:
    """The process for a worker of `key`: the least loaded process with room for another key and in its heap; among
    equals, the oldest. `alone`: the key may not share a process. None if no ready process has room.
    """
    fitting = [process for process in processes if _fits(process, key, rules, alone=alone)]
    return min(fitting, key=lambda one: (one.load, one.instance.started_at, one.worker_id), default=None)


def _fits(process: Process, key: Key, rules: PooledRules, *, alone: bool) -> bool:
    if not (process.takes_workers and process.is_ready) or process.load >= rules.keys_per_process:
        return False
    # An empty process takes a worker whatever its heap: what fills it is garbage, or would be there anyway.
    if process.load > 0 and process.heap_share >= rules.max_heap_used:
        return False
    if alone:
        return process.alone == key or process.load == 0
    return process.alone is None


def processes_to_start(processes: Sequence[Process], waiting: Sequence[bool], rules: PooledRules) -> int:
    """How many processes to start now. `waiting`: for each start that waits for a place, whether it needs its own
    process. Spares are started when no start waits."""
    usable = [process for process in processes if process.takes_workers]
    coming = sum(not process.is_ready for process in usable)
    if waiting:
        sharing = sum(not alone for alone in waiting)
        needed = sum(waiting) + -(-sharing // rules.keys_per_process)
    else:
        coming += sum(process.is_ready and process.load == 0 for process in usable)
        needed = rules.spares
    return max(0, min(needed - coming, rules.max_processes - len(usable)))


def processes_to_end(processes: Collection[Process], rules: PooledRules, *, waiting: bool, now: float) -> list[Process]:
    """The empty processes to end: those that accept no more workers at once, surplus spares after a minute, the latest
    first."""
    empty = [process for process in processes if _is_empty(process)]
    useless = [process for process in empty if not process.takes_workers]
    spares = sorted((process for process in empty if process.takes_workers), key=lambda one: one.instance.started_at)
    if waiting:
        # Spares are about to be used: to end one now would only mean to start another.
        return useless
    surplus = [one for one in spares[rules.spares :] if one.empty_since is not None]
    return useless + [one for one in surplus if now - (one.empty_since or now) >= EMPTY_FOR]


def _is_empty(process: Process) -> bool:
    """Whether it runs and holds no worker, not even an exited one whose end is not recorded yet."""
    if process.is_gone or process.closing or not (process.is_ready or process.is_outdated or process.retiring):
        return False
    return process.load == 0 and not process.assignments()


def retirement(process: Process, rules: PooledRules, *, now: float) -> str | None:
    """Why the process must be replaced; None if it need not be. `now`: seconds since the epoch."""
    if process.state is not None and process.state.draining and not process.closing:
        return "it takes no more workers"  # threads of ended workers continue in it
    if rules.max_age is not None and now - process.instance.started_at >= rules.max_age:
        return "it has reached worker.pooled.max_age"
    served = 0 if process.state is None else process.state.requests
    if rules.max_requests is not None and served >= rules.max_requests:
        return "it has reached worker.pooled.max_requests"
    return None

"""Which process gets a worker, how many processes to run, and which keys are placed alone.

Source: docs/explanation/placement.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from osrdyne.aio.clock import Clock
from osrdyne.drivers.pooled.process import Process
from osrdyne.protocol.names import Key
from osrdyne.protocol.pooled import HOST_SCOPE, ProcessMemory

GROWTH_AGE = 600.0
"""Seconds after its start for which a process is not replaced because of its heap: with a fast leak it would be
replaced again and again."""
MIN_GROWTH = 0.1
"""The minimum growth of the live heap, as a share of the heap, for which a process is replaced."""
EMPTY_FOR = 60.0
"""Seconds after which an empty process beyond the spares ends."""
DEATHS = 2
"""Ends of processes during requests of a key, after which it is placed alone."""
ALONE_FOR = 3600.0
"""Seconds for which a key is placed alone, and for which an end counts."""


@dataclass(frozen=True, slots=True)
class PooledRules:
    """`worker.pooled`, with the time limits of the driver in seconds.

    `max_age` in seconds, `max_requests` and `max_heap_growth`: a process beyond these limits is replaced; None: never.
    `max_memory_used`: the share of the memory of host or cgroup above which keys and processes are ended; None: any.
    `process_timeout`: the time in which a process must answer. `start_timeout`: the time in which a new process must be
    ready, and for which the start of a worker waits for a place. `start_attempts`: the number of consecutive processes
    that end before they are ready, after which the waiting starts fail. `stop_grace`: the time in which a process must
    end. `repeat_after`: the time after which an unanswered question is repeated.
    """

    keys_per_process: int = 50
    spares: int = 1
    max_processes: int = 8
    max_heap_used: float = 0.75
    max_memory_used: float | None = 0.85
    max_heap_growth: float | None = 0.3
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


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of processes that may share workers: of the pool, or of profiles with the same ones.

    `hash`: the hash that the processes carry. `config`: their worker configuration; None: that of the pool. `profile`:
    the pattern of the first profile with these settings; None: the pool has them.
    """

    hash: str
    spares: int
    config: Mapping[str, object] | None = field(default=None, repr=False)
    profile: str | None = None


def choose(processes: Iterable[Process], key: Key, rules: PooledRules, *, alone: bool) -> Process | None:
    """The process for a worker of `key`: the least loaded process with room for another key and in its heap; among
    equals, the oldest. Processes whose host or cgroup is short of memory come last. `alone`: the key may not share a
    process. None if no ready process has room.
    """
    fitting = [process for process in processes if _fits(process, key, rules, alone=alone)]
    return min(
        fitting,
        key=lambda one: (one.short_of_memory, one.load, one.instance.started_at, one.worker_id),
        default=None,
    )


def _fits(process: Process, key: Key, rules: PooledRules, *, alone: bool) -> bool:
    if not (process.takes_workers and process.is_ready) or process.load >= rules.keys_per_process:
        return False
    # An empty process takes a worker whatever its heap: the heap has only garbage, or what every process has.
    if process.load > 0 and process.heap_share >= rules.max_heap_used:
        return False
    if alone:
        return process.alone == key or process.load == 0
    return process.alone is None


def processes_to_start(
    processes: Sequence[Process],
    waiting: Sequence[bool],
    rules: PooledRules,
    *,
    elsewhere: Collection[Process] = (),
    others_wait: bool = False,
) -> int:
    """How many processes of the same settings to start now. `waiting`: for each start that waits for a place, whether
    it needs its own process. Spares are started when no start waits. `elsewhere`: processes with other settings, and
    `others_wait`: whether starts wait for those."""
    usable = [process for process in processes if process.takes_workers]
    others = sum(process.takes_workers for process in elsewhere)
    if (usable or (others and not waiting)) and is_shared_memory_short([*processes, *elsewhere]):
        # Another JVM would make the shortage worse: the waiting keys get the places that become free.
        return 0
    coming = sum(not process.is_ready for process in usable)
    if waiting:
        sharing = sum(not alone for alone in waiting)
        needed = sum(waiting) + -(-sharing // rules.keys_per_process)
    else:
        coming += sum(process.is_ready and process.load == 0 for process in usable)
        needed = 0 if others_wait else rules.spares
    return max(0, min(needed - coming, rules.max_processes - len(usable) - others))


def may_be_alone(processes: Iterable[Process], key: Key, rules: PooledRules) -> bool:
    """Whether the key may have a process of its own. At least half of `max_processes` remain for other keys, so a key
    shares a process if too many others have their own."""
    alone = {process.alone for process in processes if process.takes_workers and process.alone is not None}
    return key in alone or len(alone) < rules.max_processes // 2


def is_shared_memory_short(processes: Iterable[Process]) -> bool:
    """Whether memory is short that a new process would share: that of a host, or of a cgroup of several processes."""
    limits = [process.memory_limit for process in processes if process.short_of_memory and not process.is_gone]
    scopes = [limit.scope for limit in limits if limit is not None]
    return len(set(scopes)) < len(scopes) or any(scope.startswith(HOST_SCOPE) for scope in scopes)


def processes_to_end(
    processes: Collection[Process],
    rules: PooledRules,
    *,
    waiting: bool,
    now: float,
    memory_is_short: bool | None = None,
) -> list[Process]:
    """The empty processes to end: those that accept no more workers at once, surplus spares after a minute, the latest
    first. `memory_is_short`: `is_shared_memory_short` of all processes, if these are not all."""
    if memory_is_short is None:
        memory_is_short = is_shared_memory_short(processes)
    empty = [process for process in processes if _is_empty(process)]
    useless = [process for process in empty if not process.takes_workers]
    spares = sorted((process for process in empty if process.takes_workers), key=lambda one: one.instance.started_at)
    if waiting:
        # Spares are about to be used.
        return useless
    if memory_is_short:
        # A spare serves no key, so it ends before any worker is stopped.
        return useless + spares
    surplus = [one for one in spares[rules.spares :] if one.empty_since is not None]
    return useless + [one for one in surplus if now - (one.empty_since or now) >= EMPTY_FOR]


def process_to_make_room(processes: Collection[Process], wanted: Collection[str], rules: PooledRules) -> Process | None:
    """The empty process to end because starts wait for processes with other settings and `max_processes` are up: the
    latest one. `wanted`: the settings, by their hash, for which starts wait. None if there is room, or one is coming.
    """
    usable = _usable_without_room(processes, wanted, rules)
    # Only of settings for which no start waits: otherwise two settings would end each other's processes in turn.
    empty = [process for process in usable if _is_empty(process) and process.settings_hash not in wanted]
    return max(empty, key=lambda one: one.instance.started_at, default=None)


def processes_to_vacate(
    processes: Collection[Process], waiting: Collection[tuple[str, bool]], rules: PooledRules
) -> list[Process]:
    """The processes whose workers may be retired, because starts wait that have no place in them and none is empty:
    those whose workers have no requests, the one with the fewest workers first. None if one is empty already.
    `waiting`: for each start, its settings by their hash, and whether it needs its own process."""
    # A start that may share waits for room in the processes of its own settings.
    shared = {settings_hash for settings_hash, alone in waiting if not alone}
    wanted = {settings_hash for settings_hash, _ in waiting}
    others = [one for one in _usable_without_room(processes, wanted, rules) if one.settings_hash not in shared]
    if any(process.is_ready and process.load == 0 for process in others):
        return []  # that process ends as soon as the ends of its workers are recorded
    idle = [
        process
        for process in others
        if process.is_ready
        and not (process.reserved or process.starting)
        and not any(worker.in_flight for worker in process.assignments())
    ]
    return sorted(idle, key=lambda one: (one.load, one.instance.started_at))


def full_processes(
    processes: Collection[Process], waiting: Collection[tuple[str, bool]], rules: PooledRules
) -> list[list[Process]]:
    """For each settings for which starts wait that may share, if no further process may be started: the processes that
    have as many workers as they may have, or a full heap. `waiting`: as in `processes_to_vacate`."""
    shared = sorted({settings_hash for settings_hash, alone in waiting if not alone})
    usable = _usable_without_room(processes, shared, rules)
    if any(one.is_ready and one.load == 0 and one.settings_hash not in shared for one in usable):
        return []  # that process ends, and a process with these settings follows
    full = [
        one
        for one in usable
        if one.alone is None and (one.load >= rules.keys_per_process or one.heap_share >= rules.max_heap_used)
    ]
    return [[process for process in full if process.settings_hash == one] for one in shared]


def _usable_without_room(processes: Collection[Process], wanted: Collection[str], rules: PooledRules) -> list[Process]:
    """The processes that take workers, if `max_processes` are up and none is coming for some of the settings `wanted`;
    otherwise none."""
    usable = [process for process in processes if process.takes_workers]
    coming = {process.settings_hash for process in usable if not process.is_ready}
    return usable if len(usable) >= rules.max_processes and set(wanted) - coming else []


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
    if rules.max_heap_growth is not None and _has_grown(process, rules.max_heap_growth, now=now):
        return "its live heap has grown by worker.pooled.max_heap_growth with the same keys"
    return None


def _has_grown(process: Process, limit: float, *, now: float) -> bool:
    heap, memory = process.heap, ProcessMemory() if process.state is None else process.state.memory
    if heap.first is None or not memory.heap_max or now - process.instance.started_at < GROWTH_AGE:
        return False
    return heap.grown >= max(limit * heap.first, MIN_GROWTH * memory.heap_max)


class ProcessDeaths:
    """Counts the ends of processes during requests of a key: after `DEATHS` of them, the key gets its own process.

    The counts are in memory only. A new leader finds in RabbitMQ which requests have ended a worker: they are delivered
    as suspects, so that one end with a suspect counts as the second one (`blame`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[Key, list[float]] = {}

    def note(self, keys: Iterable[Key]) -> None:
        """Record that a process ended while requests of these keys ran."""
        now = self._clock.monotonic()
        self._ends = {key: recent for key, ends in self._ends.items() if (recent := _recent(ends, now))}
        for key in keys:
            self._ends.setdefault(key, []).append(now)

    def blame(self, key: Key) -> None:
        """Record that a process ended while a suspect of this key ran, which also ran at an earlier end."""
        now = self._clock.monotonic()
        self._ends[key] = [*_recent(self._ends.get(key, []), now), *[now] * DEATHS][-DEATHS:]

    def is_alone(self, key: Key) -> bool:
        """Whether the key must have its own process."""
        return len(_recent(self._ends.get(key, []), self._clock.monotonic())) >= DEATHS


def _recent(ends: Iterable[float], now: float) -> list[float]:
    return [at for at in ends if now - at < ALONE_FOR]

"""What is done to the pool and when: faults as data, drawn from a seed. Pure: the same seed gives the same faults."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

T = TypeVar("T")
INTERVAL = 9.0
"""Seconds between two faults, on average."""


class Family(StrEnum):
    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    RESTART = "restart"
    ALARM = "alarm"
    CLOCK = "clock"
    POISON = "poison"
    HOSTILE = "hostile"
    POLICY = "policy"
    IMPORT = "import"
    PERMISSION = "permission"


class Target(StrEnum):
    LEADER = "leader"
    STANDBY = "standby"
    WORKER = "worker"
    NODE = "broker"
    WORKERS = "workers"
    CLIENTS = "clients"
    MANAGEMENT = "management"
    EVERYBODY = "everybody"
    KEY = "key"
    DAEMONS = "daemons"
    QUEUES = "queues"
    REQUESTS = "requests"
    CANCEL = "cancel"
    PROGRESS = "progress"
    CREDIT = "credit"
    ACTIVITY = "activity"
    """The last five are exchanges of the pool."""


class Action(StrEnum):
    KILL = "kill"
    """kill -9; controllers and broker are started again after `seconds`."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`."""
    CUT = "cut"
    """Close the connections at once."""
    REFUSE = "refuse"
    """Close the connections, and take no new ones for `seconds`."""
    STALL = "stall"
    """Let nothing pass for `seconds`, then everything."""
    SWALLOW = "swallow"
    """Let nothing pass for `seconds`, then close the connections: what was under way is gone."""
    DELAY = "delay"
    """Let everything pass late for `seconds`."""
    RESTART = "restart"
    """Stop the broker in order; start it again after `seconds`."""
    MEMORY = "memory"
    DISK = "disk"
    AHEAD = "ahead"
    """Put the wall clock forward, and right again after `seconds`."""
    BEHIND = "behind"
    REQUEST = "request"
    """A request that kills its worker, again and again."""
    VOIDS = "voids"
    """Messages with 130 kB of headers, as are the next three."""
    FIELDS = "fields"
    DEEP = "deep"
    HEADERS = "headers"
    FOREIGN = "foreign"
    """A policy for all queues that removes what waits for longer than 3 s, for `seconds`."""
    OPERATOR = "operator"
    """The same as an operator policy, which no policy of the pool keeps away."""
    DELETE = "delete"
    """Delete all policies of the pool."""
    IMPORT = "import"
    """Delete a queue, and declare and bind it again at once."""
    FORBID = "forbid"
    """Let a user publish nothing to the default exchange for `seconds`."""


PROCESSES = (Target.LEADER, Target.STANDBY, Target.WORKER, Target.NODE)
LINKS = (Target.LEADER, Target.STANDBY, Target.WORKERS, Target.CLIENTS, Target.MANAGEMENT, Target.EVERYBODY)
CLOCKS = (Target.LEADER, Target.STANDBY, Target.WORKERS, Target.EVERYBODY)
EXCHANGES = (Target.REQUESTS, Target.CANCEL, Target.PROGRESS, Target.CREDIT, Target.ACTIVITY)
LARGE = (Action.VOIDS, Action.FIELDS, Action.DEEP, Action.HEADERS)
JUMPS = (3.0, 90.0, 3600.0)
"""Seconds by which a clock is wrong: less than `max_clock_skew`, longer than a request may wait, and a summer time."""
LONGEST: Mapping[Action, float] = {
    **dict.fromkeys((Action.CUT, Action.REQUEST, *LARGE, Action.DELETE, Action.IMPORT), 0),
    **dict.fromkeys((Action.KILL, Action.RESTART, Action.MEMORY, Action.DISK), 6),
    **dict.fromkeys((Action.REFUSE, Action.DELAY), 8),
    **dict.fromkeys((Action.STALL, Action.SWALLOW, Action.AHEAD, Action.BEHIND), 12),
    **dict.fromkeys((Action.FOREIGN, Action.OPERATOR, Action.FORBID), 20),
    Action.STOP: 15,
}
POSSIBLE: Mapping[Family, tuple[Sequence[Target], Sequence[Action]]] = {
    Family.KILL: (PROCESSES, (Action.KILL,)),
    Family.STOP: (PROCESSES, (Action.STOP,)),
    Family.CUT: (LINKS, (Action.CUT, Action.REFUSE, Action.STALL, Action.SWALLOW, Action.DELAY)),
    Family.RESTART: ((Target.NODE,), (Action.RESTART,)),
    Family.ALARM: ((Target.NODE,), (Action.MEMORY, Action.DISK)),
    Family.CLOCK: (CLOCKS, (Action.AHEAD, Action.BEHIND)),
    Family.POISON: ((Target.KEY,), (Action.REQUEST,)),
    Family.HOSTILE: (EXCHANGES, LARGE),
    Family.POLICY: ((Target.QUEUES,), (Action.FOREIGN, Action.OPERATOR, Action.DELETE)),
    Family.IMPORT: ((Target.KEY, Target.ACTIVITY, Target.CANCEL), (Action.IMPORT,)),
    Family.PERMISSION: ((Target.WORKERS, Target.DAEMONS), (Action.FORBID,)),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at` seconds after the beginning, for `seconds`. `draw` decides whom it hits among many."""

    at: float
    family: Family
    action: Action
    target: Target
    seconds: float
    draw: float

    @property
    def jump(self) -> float:
        """Seconds by which it puts a clock forward, negative for back."""
        sign = {Action.AHEAD: 1, Action.BEHIND: -1}.get(self.action, 0)
        return sign * drawn(self, JUMPS)


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that took place, in seconds since the epoch."""

    fault: Fault
    began: float
    ended: float


def drawn(fault: Fault, candidates: Sequence[T]) -> T:
    """The one that the fault's draw means."""
    return candidates[int(fault.draw * len(candidates))]


def make_schedule(
    seed: int, length: float, families: Iterable[Family] = Family, *, interval: float = INTERVAL
) -> tuple[Fault, ...]:
    """Faults for `length` seconds: in each round every family once, in an order of chance; long ones overlap.

    With a shorter `interval` between two of them they last as much shorter.
    """
    random = Random(seed)
    rounds, faults, wanted = list[Family](), list[Fault](), list(families)
    while (beginning := len(faults) * interval) + interval <= length:
        if not rounds:
            rounds = random.sample(wanted, len(wanted))
        at = beginning + random.uniform(0, interval)
        faults.append(_draw_fault(random, rounds.pop(), at=at, scale=interval / INTERVAL))
    return tuple(faults)


def _draw_fault(random: Random, family: Family, *, at: float, scale: float) -> Fault:
    targets, actions = POSSIBLE[family]
    action, target = random.choice(actions), random.choice(targets)
    seconds = random.uniform(0, LONGEST[action]) * scale
    return Fault(round(at, 2), family, action, target, round(seconds, 2), random.random())


def count_families(faults: Iterable[Fault]) -> dict[Family, int]:
    counted = Counter(fault.family for fault in faults)
    return {family: counted[family] for family in Family}

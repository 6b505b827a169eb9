"""Plan capacity: the demand of a load on each limit, when a quota is used up, how long events queue, and which tiers
hold the load.

Pure and exact: all figures are fractions, and messages of a phase arrive evenly. A hub refuses messages beyond its send
rate or its daily quota, which is reset at 00:00 UTC. A store takes events at its rate in the order of their arrival;
further events wait. It keeps its events until it is full, then it removes the oldest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

from osrdyne.ingress.quotas.tiers import (
    EVENT_BLOCK_BYTES,
    HUB_TIERS,
    MINUTES_A_DAY,
    STORE_TIERS,
    HubTier,
    StoreTier,
)
from osrdyne.protocol.rates import LARGEST_EVENT, blocks

_T = TypeVar("_T")

MAX_PHASES = 1_000
MAX_DAYS = 31
# Names of the meters: the quota (in blocks) and the send rate of the hub, the rate of the store.
QUOTA, RATE, EVENTS = "blocks a day", "messages a second", "events a minute"


@dataclass(frozen=True, slots=True)
class Phase:
    """A time with a constant load. `events`: of one message, on average; sizes in bytes."""

    minutes: Fraction
    messages_a_minute: Fraction
    events: Fraction = Fraction(1)
    message_bytes: int = 1024
    event_bytes: int = 1024

    @property
    def event_blocks(self) -> int:
        """The number of events as which the store counts one event."""
        return blocks(min(self.event_bytes, LARGEST_EVENT), EVENT_BLOCK_BYTES)

    @property
    def events_a_minute(self) -> Fraction:
        """The events offered to the store if the hub accepts all messages."""
        return self.messages_a_minute * self.events * self.event_blocks


@dataclass(frozen=True, slots=True)
class Load:
    """Phases, the first of which begins `start` minutes after 00:00 UTC. `repeats`: the phases make up a day that
    repeats; otherwise nothing is sent after the last one."""

    phases: tuple[Phase, ...]
    start: Fraction = Fraction(0)
    repeats: bool = False

    @classmethod
    def steady(cls, phase: Phase) -> Load:
        """The load of a phase at all times."""
        return cls((replace(phase, minutes=Fraction(MINUTES_A_DAY)),), repeats=True)


@dataclass(frozen=True, slots=True)
class Hub:
    """A tier of the hub with its units."""

    tier: HubTier
    units: int

    @property
    def quota(self) -> int:
        """Blocks a day."""
        return self.tier.blocks_a_day * self.units

    @property
    def rate(self) -> int:
        """Messages a second."""
        return self.tier.rate(self.units)


@dataclass(frozen=True, slots=True)
class Store:
    """A tier of the store with its units."""

    tier: StoreTier
    units: int

    @property
    def rate(self) -> int:
        """Events a minute."""
        return self.tier.events_a_minute * self.units

    @property
    def kept(self) -> int:
        """Events that it keeps."""
        return self.tier.kept_events * self.units


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit. `utilisation`: the largest demand as a share of it, above 1 if it does not hold. `used_up_after`: when
    it is used up, in minutes after the load begins; None if never. `excess`: the messages that it refuses; of the
    store, the largest number of waiting events."""

    name: str
    demand: Fraction
    limit: Fraction
    used_up_after: Fraction | None = None
    excess: Fraction = Fraction(0)

    @property
    def utilisation(self) -> Fraction:
        return self.demand / self.limit


@dataclass(frozen=True, slots=True)
class Queue:
    """The events that wait for the store. Times in minutes; `drained`: when the queue is empty for the last time, after
    the load begins; None if a load that repeats makes it longer every day. `growth`: the largest number of events a
    minute by which it grows.
    """

    queued: Fraction = Fraction(0)
    worst_lag: Fraction = Fraction(0)
    worst_events: Fraction = Fraction(0)
    growth: Fraction = Fraction(0)
    drained: Fraction | None = Fraction(0)


@dataclass(frozen=True, slots=True)
class Storage:
    """The events that the store keeps. `days`: for how long it keeps events of a load that repeats; None for one that
    does not, and if nothing is stored. `needed`: the events of the retention that was asked for, by their arrival."""

    limit: int
    days: Fraction | None
    needed: Fraction | None

    @property
    def holds(self) -> bool:
        return self.needed is None or self.needed <= self.limit


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiers and units that hold a load, and their price per month; `store` None: the plan is for a hub alone."""

    hub: Hub
    store: Store | None
    price: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The result for a load. `cheapest`: None if no tiers hold it. `fits`: nothing is refused, no event waits for
    longer than `max_lag` minutes, and none is removed before the end of the retention."""

    meters: tuple[Meter, ...]
    accepted: Fraction
    queue: Queue | None
    max_lag: Fraction
    storage: Storage | None = None
    cheapest: Choice | None = None

    @property
    def fits(self) -> bool:
        refused = any(meter.excess for meter in self.meters if meter.name != EVENTS)
        is_kept = self.storage is None or self.storage.holds
        return not refused and is_kept and (self.queue is None or _holds(self.queue, self.max_lag))


@dataclass(frozen=True, slots=True)
class _Flow:
    """Events that reach the store at a constant rate from a moment on, which is minutes after the first midnight."""

    at: Fraction
    minutes: Fraction
    events_a_minute: Fraction


class _HubMeter:
    """A hub while a load passes it."""

    def __init__(self, hub: Hub) -> None:
        self._quota, self._rate, self._block_bytes = hub.quota, Fraction(60 * hub.rate), hub.tier.block_bytes
        self._day = Fraction(-1)
        self._left = self._demand = Fraction(0)  # Blocks of this day.
        self.worst_day = self.accepted = Fraction(0)
        self.refused = {QUOTA: Fraction(0), RATE: Fraction(0)}
        self.used_up_at: dict[str, Fraction] = {}

    def take(self, at: Fraction, phase: Phase) -> Iterator[_Flow]:
        """The events of a phase that pass. The phase begins at `at` and does not cross midnight."""
        if (day := Fraction(at // MINUTES_A_DAY)) != self._day:
            self._day, self._left, self._demand = day, Fraction(self._quota), Fraction(0)
        size, offered = blocks(phase.message_bytes, self._block_bytes), phase.messages_a_minute
        self._demand += offered * phase.minutes * size
        self.worst_day = max(self.worst_day, self._demand)
        passing = min(offered, self._rate)
        if offered > passing:
            self.refused[RATE] += (offered - passing) * phase.minutes
            self.used_up_at.setdefault(RATE, at)
        wanted = passing * phase.minutes
        taken, minutes = wanted, phase.minutes
        # Whole messages only: a message that needs more blocks than are left is refused.
        if (room := Fraction(self._left // size)) < wanted:
            taken, minutes = room, room / passing
            self.refused[QUOTA] += wanted - taken
            self.used_up_at.setdefault(QUOTA, at + minutes)
        self._left -= taken * size
        self.accepted += taken
        yield _Flow(at, minutes, passing * phase.events * phase.event_blocks)
        yield _Flow(at + minutes, phase.minutes - minutes, Fraction(0))


def _pass_hub(load: Load, hub: Hub, *, days: int) -> tuple[_HubMeter, list[_Flow]]:
    meter, passed, at = _HubMeter(hub), list[_Flow](), load.start
    for phase in load.phases * days:
        rest = phase.minutes
        while rest > 0:
            # A phase is cut at midnight, when the quota is reset.
            minutes = min(rest, MINUTES_A_DAY - at % MINUTES_A_DAY)
            passed += [flow for flow in meter.take(at, replace(phase, minutes=minutes)) if flow.minutes]
            at, rest = at + minutes, rest - minutes
    return meter, passed


def _pass_store(passed: Sequence[_Flow], store: Store, load: Load) -> Queue:
    """The queue before a store. For a load that repeats, the figures are those of the second of two days, because the
    first one may leave a queue; of the first day if the queue grows every day."""
    rate, waiting = Fraction(store.rate), Fraction(0)
    queued = worst = growth = drained = Fraction(0)
    end = passed[-1].at + passed[-1].minutes if passed else load.start
    total = sum((flow.minutes * flow.events_a_minute for flow in passed), Fraction(0))
    is_endless = load.repeats and total > rate * (end - load.start)
    second_day = load.start + MINUTES_A_DAY
    for flow in passed:
        net, before = flow.events_a_minute - rate, waiting
        waiting = max(Fraction(0), waiting + net * flow.minutes)
        # Minutes of this flow in which something waits.
        busy = flow.minutes if waiting or (before and not net) else before / -net if net < 0 else Fraction(0)
        if before and not waiting:
            drained = flow.at + busy - load.start
        if not load.repeats or (flow.at < second_day) is is_endless:
            queued, worst, growth = queued + busy, max(worst, before, waiting), max(growth, net)
    if is_endless:
        return Queue(queued, worst / rate, worst, growth, None)
    if waiting and not load.repeats:
        queued, drained = queued + waiting / rate, end - load.start + waiting / rate
    return Queue(queued, worst / rate, worst, growth, drained)


def _storage(passed: Sequence[_Flow], store: Store, load: Load, retention_days: int | None) -> Storage:
    """What the store keeps of the events of a day that repeats, or of all events of another load."""
    totals = [*accumulate((flow.minutes * flow.events_a_minute for flow in passed), initial=Fraction(0))]
    starts = [flow.at for flow in passed]

    def arrived_before(at: Fraction) -> Fraction:
        place = bisect_right(starts, at) - 1
        if place < 0:
            return Fraction(0)
        return totals[place] + min(at - starts[place], passed[place].minutes) * passed[place].events_a_minute

    if load.repeats:
        a_day = min(totals[-1], Fraction(store.rate * MINUTES_A_DAY))
        needed = None if retention_days is None else a_day * retention_days
        return Storage(store.kept, Fraction(store.kept) / a_day if a_day else None, needed)
    if retention_days is None:
        return Storage(store.kept, None, None)
    # The most that arrives in any time of that length begins or ends where the load changes.
    kept = Fraction(retention_days * MINUTES_A_DAY)
    edges = [*starts, *(flow.at + flow.minutes for flow in passed[-1:])]
    begins = [*edges, *(edge - kept for edge in edges)]
    needed = max((arrived_before(at + kept) - arrived_before(at) for at in begins), default=Fraction(0))
    return Storage(store.kept, None, min(needed, store.rate * kept))


def _holds(queue: Queue, max_lag: Fraction) -> bool:
    return queue.drained is not None and queue.worst_lag <= max_lag


def plan(
    load: Load,
    hub: Hub,
    store: Store | None = None,
    *,
    max_lag: Fraction = Fraction(1),
    retention_days: int | None = None,
) -> Plan:
    """The plan for a load on a hub and, if given, a store. `retention_days`: how long it must keep each event; None:
    any time."""
    meter, passed = _pass_hub(load, hub, days=1)
    peak = max((phase.messages_a_minute for phase in load.phases), default=Fraction(0))
    used_up = {name: at - load.start for name, at in meter.used_up_at.items()}
    meters = [
        Meter(QUOTA, meter.worst_day, Fraction(hub.quota), used_up.get(QUOTA), meter.refused[QUOTA]),
        Meter(RATE, peak / 60, Fraction(hub.rate), used_up.get(RATE), meter.refused[RATE]),
    ]
    queue = storage = None
    if store is not None:
        storage = _storage(passed, store, load, retention_days)
        queue = _pass_store(_pass_hub(load, hub, days=2)[1] if load.repeats else passed, store, load)
        offered = max((phase.events_a_minute for phase in load.phases), default=Fraction(0))
        begins = next((flow.at - load.start for flow in passed if flow.events_a_minute > store.rate), None)
        meters.append(Meter(EVENTS, offered, Fraction(store.rate), begins, queue.worst_events))
    return Plan(tuple(meters), meter.accepted, queue, max_lag, storage)


def cheapest(
    load: Load, prices: Mapping[str, float], *, with_store: bool, max_lag: Fraction, retention_days: int | None = None
) -> Choice | None:
    """The cheapest tiers and units that hold a load; None if none do. `prices`: of a unit and month, by tier."""
    hubs = []
    for tier in HUB_TIERS.values():
        of_hub = (Hub(tier, units) for units in range(1, tier.max_units + 1))
        if (hub := _fewest(list(of_hub), lambda hub: plan(load, hub).fits)) is not None:
            hubs.append((prices[tier.name] * hub.units, hub))
    if not hubs:
        return None
    hub_price, hub = min(hubs, key=lambda one: one[0])
    if not with_store:
        return Choice(hub, None, hub_price)
    stores = []
    for kind in STORE_TIERS.values():
        of_store = (Store(kind, units) for units in range(1, kind.max_units + 1))
        store = _fewest(
            list(of_store),
            lambda store: plan(load, hub, store, max_lag=max_lag, retention_days=retention_days).fits,
        )
        if store is not None:
            stores.append((prices[kind.name] * store.units, store))
    if not stores:
        return None
    store_price, store = min(stores, key=lambda one: one[0])
    return Choice(hub, store, hub_price + store_price)


def _fewest(ascending: Sequence[_T], holds: Callable[[_T], bool]) -> _T | None:
    """The first that holds; more units never hold less."""
    place = bisect_left(ascending, True, key=holds)
    return ascending[place] if place < len(ascending) else None

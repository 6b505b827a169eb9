"""One meter of a quota document: the daily quota and the send rate of the pool or of a rule. Pure.

`refuse` is called first, on every meter of a request, and then `charge` on all of them: a refused request uses up
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.ingress.quotas.counters import CounterTable, name_hash
from osrdyne.ingress.quotas.document import Limits
from osrdyne.protocol.statuses import Status

WARNING_LEVELS = (70, 85, 95)  # Per cent of a quota.
_EPSILON = 1e-6  # Seconds, for rounding errors of the send rate.
_EXACT_SHARES = 1_000  # Up to this number of names, shares are computed for each new name.


@dataclass(frozen=True, slots=True)
class Excess:
    """Why a meter refuses a message, and the seconds until it may be sent again."""

    status: Status
    detail: str
    retry_after: float


@dataclass(frozen=True, slots=True)
class Level:
    """A warning level that a quota has reached for the first time in its day. `name`: whose quota, if each name has its
    own."""

    meter: str
    percent: int
    name: str | None


class Meter:
    """A meter. `each`: each name has limits of its own. `shared`: the names share the quota fairly. Otherwise names are
    ignored.

    Fair share: each of n names has 1/n of the quota. The unused parts of the shares of the others, times the part of
    the day that is left, are reserved for them. A name may use the rest beyond its share, so that the whole quota can
    be used by the end of the day.
    """

    def __init__(self, name: str, limits: Limits, *, each: bool = False, shared: bool = False) -> None:
        self.name, self.limits, self.each, self.shared = name, limits, each, shared
        self.used = 0  # Of all names together.
        self.warned = 0  # The highest warning level of this day so far.
        self.table = CounterTable() if each or shared else None
        self.scale = 1.0
        self._next = 0.0  # The earliest moment of the next message at the send rate (GCRA).
        self._share = self._within = self._shared_by = 0

    @property
    def quota(self) -> int | None:
        """Blocks of this day: of each name, if each has its own."""
        blocks = self.limits.blocks_a_day
        return None if blocks is None else int(blocks * self.scale)

    def refuse(self, name: str, amount: int, *, now: float, remaining: float) -> Excess | None:
        """Why the meter refuses `amount` blocks; None if it does not. `now`: monotonic; `remaining`: seconds of the
        day."""
        hashed = 0 if self.table is None else name_hash(name)
        return self._refuse_quota(name, hashed, amount, remaining) or self._refuse_rate(name, hashed, now)

    def _refuse_quota(self, name: str, hashed: int, amount: int, remaining: float) -> Excess | None:
        quota = self.quota
        if quota is None:
            return None
        own = self.used if self.table is None else self.table.count(hashed)
        used = own if self.each else self.used
        if used + amount > quota:
            whose = f" of {name!r}" if self.each else ""
            return self._exceeded(f"The daily quota of the {self.name}{whose} is used up ({quota:,} blocks)", remaining)
        if not self.shared or self.table is None:
            return None
        is_new = self.table.find(hashed) is None
        share = quota // (self.table.size + 1) if is_new else self._share
        if own + amount <= share:
            return None
        others = max(0, self.table.size * self._share - self._within - (0 if is_new else max(0, self._share - own)))
        free = quota - self.used - amount
        if free >= others * remaining / (86_400.0 * self.scale):
            return None
        # The part that is reserved for the others shrinks evenly.
        wait = remaining - 86_400.0 * self.scale * free / others
        text = f"The share of {name!r} in the daily quota of the {self.name} is used up ({share:,} blocks)"
        return self._exceeded(f"{text}, and the rest is reserved for others", wait)

    def _exceeded(self, text: str, wait: float) -> Excess:
        return Excess(Status.QUOTA_EXCEEDED, f"{text}; quotas are reset at 00:00 UTC.", wait)

    def _refuse_rate(self, name: str, hashed: int, now: float) -> Excess | None:
        rate = self.limits.send_rate
        if rate is None:
            return None
        moment = self._next
        if self.each and self.table is not None:
            place = self.table.find(hashed)
            moment = 0.0 if place is None else self.table.moments[place]
        wait = moment - (self.limits.burst - 1) / rate - now
        if wait <= _EPSILON:
            return None
        whose = f" of {name!r}" if self.each else ""
        return Excess(
            Status.RATE_LIMITED,
            f"The send rate of the {self.name}{whose} is {rate:g} messages a second, and {self.limits.burst} at once.",
            wait,
        )

    def charge(self, name: str, amount: int, *, now: float) -> Level | None:
        """Count a message that every meter accepts. Returns the warning level that it reaches, if any."""
        self.used += amount
        own = self.used
        place = None
        if self.table is not None:
            hashed, known = name_hash(name), self.table.size
            place = self.table.add(name, hashed, amount)
            own = self.table.counts[place]
            self._within += min(own, self._share) - min(own - amount, self._share)
            if self.shared and self.table.size != known:
                self._update_shares()
        if (rate := self.limits.send_rate) is not None:
            if self.each and self.table is not None and place is not None:
                self.table.moments[place] = max(now, self.table.moments[place]) + 1 / rate
            else:
                self._next = max(now, self._next) + 1 / rate
        return self._reached(name, own if self.each else self.used)

    def _reached(self, name: str, used: int) -> Level | None:
        quota = self.quota
        if not quota:
            return None
        percent = max((level for level in WARNING_LEVELS if 100 * used >= level * quota), default=0)
        if percent <= self.warned:
            return None
        self.warned = percent
        return Level(self.name, percent, name if self.each else None)

    def _update_shares(self, *, forced: bool = False) -> None:
        """Compute the shares. This iterates over all names, so with many names it is not done for each new one."""
        assert self.table is not None
        names = self.table.size
        if not forced and names > _EXACT_SHARES and 20 * names < 21 * self._shared_by:
            return
        self._shared_by = names
        self._share = (self.quota or 0) // max(1, names)
        self._within = sum(min(count, self._share) for _, count, _ in self.table.items())

    def begin_day(self, scale: float) -> None:
        """Begin a day. `scale`: the part of a day's quota that it has."""
        self.used = self.warned = 0
        self.scale = scale
        if self.table is not None:
            self.table.reset()
        self.refresh()

    def refresh(self) -> None:
        """Compute the values that depend on the counters, after the counters were set."""
        if self.shared:
            self._update_shares(forced=True)
        largest = (
            max((count for _, count, _ in self.table.items()), default=0) if self.each and self.table else self.used
        )
        self._reached("", largest)

    def take_over(self, former: Meter) -> None:
        """Continue with the counts of an earlier meter, if both count the same names."""
        if (former.each, former.shared) == (self.each, self.shared):
            self.used, self.table, self._next = former.used, former.table, former._next
        elif not self.each:
            self.used = former.used
        self.refresh()

    def used_by(self, name: str) -> int:
        """The blocks that a name has used."""
        return 0 if self.table is None else self.table.count(name_hash(name))

    @property
    def largest(self) -> int:
        """Used blocks; of the name with the largest use, if each has its own quota."""
        if not self.each or self.table is None:
            return self.used
        return max(self.table.counts)

"""All quotas of a pool: accept or refuse messages, count the accepted ones, and store the counts. Pure.

A message counts at the meter of the pool and at the meter of the first rule that matches it. It counts as the blocks of
its body, at least one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from osrdyne.ingress.checks import Refusal, RequestCheck
from osrdyne.ingress.quotas.document import Per, QuotaManifest, Rule, Share
from osrdyne.ingress.quotas.forecast import Forecast, UsageRecord
from osrdyne.ingress.quotas.meters import Excess, Level, Meter
from osrdyne.ingress.quotas.state import CountedMeter, QuotaState
from osrdyne.ingress.quotas.window import DayWindow, Moment
from osrdyne.ingress.requests import Arrival
from osrdyne.protocol.rates import blocks

_KNOWN_MATCHES = 4_096  # Keys and principals whose rule is remembered.
_POOL_BLOCK = 4096  # Bytes, for the record of use in a pool without a quota of its own.


@dataclass(frozen=True, slots=True)
class Sent:
    """The properties of a message that meters need. `principal`: the user or application that sent it."""

    key: str
    principal: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MeterUsage:
    """The state of one meter. `used`: blocks; of the name with the largest use if `each` has its own quota."""

    name: str
    used: int
    quota: int | None
    each: bool
    shared: bool
    names: int
    largest: tuple[tuple[str, int], ...]
    send_rate: float | None
    burst: int | None

    @property
    def ratio(self) -> float | None:
        return self.used / self.quota if self.quota else None


@dataclass(frozen=True, slots=True)
class Usage:
    """The state of all quotas. `remaining`: seconds until they are reset. `days`: the record of use, this day last."""

    remaining: float
    meters: tuple[MeterUsage, ...]
    forecast: Forecast | None
    days: list[list[list[int]]]


class Quotas:
    """The quotas of a pool. Times are given as a `Moment`."""

    def __init__(self, manifest: QuotaManifest, now: Moment) -> None:
        self.window = DayWindow(now)
        self.record = UsageRecord()
        self._pool: Meter | None = None
        self._rules: tuple[tuple[Rule, Meter], ...] = ()
        self._pool_per = Share.NONE
        self.use(manifest)

    @property
    def meters(self) -> list[Meter]:
        return [*filter(None, [self._pool]), *(meter for _, meter in self._rules)]

    def use(self, manifest: QuotaManifest) -> None:
        """Use other limits. Meters whose name stays keep their counts."""
        former = {meter.name: meter for meter in self.meters}
        self._pool_per = manifest.share
        self._pool = None
        if manifest.pool is not None:
            self._pool = Meter("pool", manifest.pool, shared=manifest.share is not Share.NONE)
        self._rules = tuple(
            (rule, Meter(f"rule {rule.name}", rule.limits, each=rule.per is not Per.RULE)) for rule in manifest.rules
        )
        self._rule_of = lru_cache(_KNOWN_MATCHES)(self._find_rule)
        for meter in self.meters:
            meter.scale = self.window.scale
            if (before := former.get(meter.name)) is not None:
                meter.take_over(before)

    def _find_rule(self, key: str, principal: str) -> tuple[Rule, Meter] | None:
        return next((one for one in self._rules if one[0].matches(key, principal)), None)

    def _concerned(self, sent: Sent) -> list[tuple[Meter, str]]:
        """The meters of a message, with the name under which each counts it."""
        found = []
        if self._pool is not None:
            found.append((self._pool, sent.key if self._pool_per is Share.KEY else sent.principal))
        if self._rules and (one := self._rule_of(sent.key, sent.principal)) is not None:
            found.append((one[1], sent.key if one[0].per is Per.KEY else sent.principal))
        return found

    def advance(self, now: Moment) -> None:
        """Begin a new day if it is time."""
        if self.window.advance(now):
            self.record.begin_day(None if self._pool is None else self._pool.quota)
            for meter in self.meters:
                meter.begin_day(self.window.scale)

    def decide(self, sent: Sent, now: Moment) -> Excess | None:
        """Why a message is refused, by the meter with the longest wait; None if it is accepted. Counts nothing."""
        self.advance(now)
        worst, remaining = None, self.window.remaining(now)
        for meter, name in self._concerned(sent):
            amount = blocks(sent.size_bytes, meter.limits.block_bytes)
            excess = meter.refuse(name, amount, now=now.monotonic, remaining=remaining)
            if excess is not None and (worst is None or excess.retry_after > worst.retry_after):
                worst = excess
        return worst

    def charge(self, sent: Sent, now: Moment) -> list[Level]:
        """Count an accepted message. Returns the warning levels that it reaches."""
        self.advance(now)
        reached = []
        for meter, name in self._concerned(sent):
            amount = blocks(sent.size_bytes, meter.limits.block_bytes)
            if (level := meter.charge(name, amount, now=now.monotonic)) is not None:
                reached.append(level)
        size = _POOL_BLOCK if self._pool is None else self._pool.limits.block_bytes
        remaining = self.window.remaining(now)
        self.record.add(blocks(sent.size_bytes, size), sent.size_bytes, remaining=remaining, now=now.monotonic)
        return reached

    def describe(self, sent: Sent, now: Moment) -> list[str]:
        """The meters that count a message, each as a phrase."""
        self.advance(now)
        found = []
        for meter, name in self._concerned(sent):
            quota, used = meter.quota, meter.used_by(name) if meter.each else meter.used
            daily = "" if quota is None else f": {used:,} of {quota:,} blocks of the day are used"
            found.append(f"the {meter.name} counts it{daily}")
        return found

    def usage(self, now: Moment, *, largest: int = 20) -> Usage:
        """The state of all meters, with the names of the largest use."""
        self.advance(now)
        remaining = self.window.remaining(now)
        forecast = None
        if self._pool is not None and (quota := self._pool.quota) is not None:
            forecast = self.record.forecast(quota - self._pool.used, remaining=remaining, now=now.monotonic)
        return Usage(remaining, tuple(_usage_of(meter, largest) for meter in self.meters), forecast, self.record.rows)

    # --- storing

    def store(self, now: Moment) -> QuotaState:
        """The state for the next leader: the counts of this day, and the record of use."""
        record = self.record
        return QuotaState(
            window=self.window.store(now),
            days=record.rows,
            noon_forecast=record.noon_forecast,
            yesterdays_error=record.yesterdays_error,
            meters=[_counted(meter) for meter in self.meters],
        )

    def restore(self, state: QuotaState, now: Moment) -> None:
        """Continue with a stored state."""
        self.window, is_present = DayWindow.restored(state.window, now)
        self.record = record = UsageRecord()
        record.days.extend(state.days[:-1])
        record.today = state.days[-1]
        record.noon_forecast, record.yesterdays_error = state.noon_forecast, state.yesterdays_error
        if not is_present:
            record.begin_day(None if self._pool is None else self._pool.quota)
        found = {(one.name, one.each, one.shared): one for one in state.meters}
        for meter in self.meters:
            meter.scale = self.window.scale
            if is_present and (counted := found.get((meter.name, meter.each, meter.shared))) is not None:
                meter.used = counted.used
                if meter.table is not None:
                    meter.table.load(array("Q", counted.hashes), array("q", counted.counts), counted.names)
                meter.refresh()


def _usage_of(meter: Meter, largest: int) -> MeterUsage:
    limits = meter.limits
    return MeterUsage(
        name=meter.name,
        used=meter.largest,
        quota=meter.quota,
        each=meter.each,
        shared=meter.shared,
        names=0 if meter.table is None else meter.table.size,
        largest=() if meter.table is None else tuple(meter.table.largest(largest)),
        send_rate=limits.send_rate,
        burst=None if limits.send_rate is None else limits.burst,
    )


def _counted(meter: Meter) -> CountedMeter:
    if meter.table is None:
        return CountedMeter(meter.name, meter.each, meter.shared, meter.used)
    hashes, counts = meter.table.dump()
    names = dict(meter.table.names)
    return CountedMeter(meter.name, meter.each, meter.shared, meter.used, hashes.tobytes(), counts.tobytes(), names)


def sent_of(arrival: Arrival) -> Sent:
    """The properties of a request for the meters. The principal is the owner of the token, else the AMQP `user-id`,
    which RabbitMQ verifies, else the `app-id`, which nothing verifies."""
    principal = arrival.principal or arrival.user_id or arrival.app_id or ""
    return Sent(arrival.request.key, principal, len(arrival.request.body))


def quota_check(
    quotas: Callable[[], Quotas | None], now: Callable[[], Moment], on_passed: Callable[[list[Level]], None]
) -> RequestCheck:
    """The check of quotas. `quotas`: the active ones; None: there are none. `on_passed` is called with the warning
    levels that a counted request reaches."""
    # The latest request that was not refused. It is usually the next one to pass, and is not read a second time then.
    latest: tuple[Arrival, Sent, Moment] | None = None

    def decide(arrival: Arrival, now_ms: int) -> Refusal | None:
        nonlocal latest
        active = quotas()
        if active is None:
            return None
        sent, moment = sent_of(arrival), now()
        excess = active.decide(sent, moment)
        latest = (arrival, sent, moment) if excess is None else None
        return None if excess is None else Refusal(excess.status, excess.detail, _whole_ms(excess.retry_after))

    def passed(arrival: Arrival) -> None:
        nonlocal latest
        active = quotas()
        if active is None:
            return
        _, sent, moment = latest if latest is not None and latest[0] is arrival else (arrival, sent_of(arrival), now())
        latest = None
        on_passed(active.charge(sent, moment))

    def describe(arrival: Arrival) -> str | None:
        active = quotas()
        if active is None or not (texts := active.describe(sent_of(arrival), now())):
            return None
        return f"{', '.join(texts)}."

    return RequestCheck("quota", decide, passed, describe)


def _whole_ms(seconds: float) -> int:
    """Rounded up: a client that waits for so long is accepted."""
    return max(1, math.ceil(seconds * 1000))

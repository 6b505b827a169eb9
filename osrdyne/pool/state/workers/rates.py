"""The rates at which workers may serve events, from the active quotas. No I/O.

`ActiveQuotas` (`pool.routing.quotas`) writes it. The specifications of workers and `WorkerRates` read it.
"""

from __future__ import annotations

from collections.abc import Sequence

from osrdyne.aio.clock import Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.ingress.quotas.document import Rate
from osrdyne.protocol.names import Key
from osrdyne.protocol.rates import EventRate


class GroupRates:
    """The rates of the groups; `changed` is set when they change."""

    def __init__(self, clock: Clock) -> None:
        self.changed = Wakeup(clock)
        self._rates: tuple[Rate, ...] = ()

    def use(self, rates: Sequence[Rate]) -> None:
        """Use these rates; the first that matches a key counts."""
        if tuple(rates) != self._rates:
            self._rates = tuple(rates)
            self.changed.set()

    def of(self, key: Key, *, workers: int = 1) -> EventRate | None:
        """The rate of each worker of a group with this number of workers; None: no limit."""
        return next((rate.of_worker(workers) for rate in self._rates if rate.matches(key)), None)

    def of_table(self, key: Key) -> EventRate | None:
        """The rate of a table of telemetry, by the key of one of its partitions. A rate for all keys is about workers,
        and limits no table."""
        return next((rate.of_worker(1) for rate in self._rates if rate.keys is not None and rate.matches(key)), None)

    def describe(self, key: Key) -> str | None:
        """A sentence about the rate of a group; None for no limit."""
        if (rate := self.of(key)) is None:
            return None
        return (
            f"The workers of {key!r} serve {rate.events_per_minute:g} events a minute in total; a larger event than "
            f"{rate.event_bytes} bytes counts as several."
        )

"""What a pool keeps by its settings, and for how many days of a load. Pure; used by `osrdyne capacity`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from osrdyne.config.models import Settings
from osrdyne.ingress.quotas.capacity import Load
from osrdyne.ingress.quotas.tiers import MINUTES_A_DAY

DAY = 86_400


@dataclass(frozen=True, slots=True)
class Kept:
    """A store of a pool with its limits; None: no limit. `max_age`: seconds. `days`: for how long it keeps what a load
    that repeats adds; None if that does not follow from the limits and the load. `pauses`: it is full after these days,
    and takes nothing more until it has room again."""

    name: str
    max_age: float | None = None
    max_bytes: int | None = None
    max_count: int | None = None
    days: float | None = None
    pauses: bool = False


def kept_by_pool(settings: Settings, load: Load) -> Iterator[Kept]:
    """The log and the tables of telemetry if all messages of the load go there, the poison inventory and the audit."""
    log, audit = settings.telemetry, settings.audit
    if log.name is not None:
        size = _a_day(load, [phase.messages_a_minute * phase.message_bytes for phase in load.phases])
        days = _shortest(load, log.max_age / DAY, _days(log.max_bytes, size))
        yield Kept(f"log {log.name}", log.max_age, log.max_bytes, days=days)
    events = _a_day(load, [phase.messages_a_minute * phase.events for phase in load.phases])
    tables = settings.worker.config.get("tables")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        retention, rows, size_limit = (_limit(table, limit) for limit in ("retention_days", "max_rows", "max_bytes"))
        # How large a row is on disk depends on the data.
        days = _shortest(load, retention, _days(rows, events)) if size_limit is None else None
        # It removes the oldest rows when it is full only if it says so.
        pauses = days is not None and days != retention and table.get("on_storage_limit") != "purge"
        max_age = None if retention is None else retention * float(DAY)
        yield Kept(f"table {name}", max_age, size_limit, rows, days, pauses)
    yield Kept("poison inventory", max_bytes=settings.requests.poison_max_bytes)
    yield Kept("audit", audit.max_age, max_count=audit.max_changes)


def _a_day(load: Load, a_minute: list[Fraction]) -> Fraction:
    minutes = sum((phase.minutes for phase in load.phases), Fraction(0))
    total = sum((one * phase.minutes for one, phase in zip(a_minute, load.phases, strict=True)), Fraction(0))
    return total * MINUTES_A_DAY / minutes if minutes else Fraction(0)


def _days(limit: int | None, a_day: Fraction) -> float | None:
    return None if limit is None or not a_day else float(limit / a_day)


def _shortest(load: Load, *days: float | None) -> float | None:
    return min((one for one in days if one is not None), default=None) if load.repeats else None


def _limit(table: Any, name: str) -> int | None:
    """A limit of a table in `worker.config`, which the application checks."""
    found = table.get(name) if isinstance(table, Mapping) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 2**63 else None

"""The document of a capacity question and its answer, for `osrdyne capacity` and `POST /v1/capacity`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, field_validator, model_validator

from osrdyne.config.types import Duration, Model, Size
from osrdyne.ingress.quotas.capacity import MAX_DAYS, MAX_PHASES, Choice, Hub, Load, Phase, Plan, Store, cheapest, plan
from osrdyne.ingress.quotas.tiers import HUB_TIERS, MAX_RETENTION_DAYS, MINUTES_A_DAY, STORE_TIERS

_UNITS = {"s": Fraction(60), "min": Fraction(1), "h": Fraction(1, 60), "day": Fraction(1, MINUTES_A_DAY)}
_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,4})?)\s*(?:/\s*(s|min|h|day))?\Z", re.ASCII)
_LARGEST_RATE = 10**9  # Messages a minute.


def parse_rate(value: object) -> object:
    """Messages a minute from `277/min`, `12/s`, `400000/day` or a number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Fraction):
        raise ValueError("must be a rate such as 277/min, 12/s or 400000/day")
    if isinstance(value, Fraction):
        rate = value
    elif isinstance(value, str):
        found = _RATE.match(value.strip())
        if found is None:
            raise ValueError(f"{value!r} is not a rate; write 277/min, 12/s, 16000/h or 400000/day")
        rate = Fraction(found[1]) * _UNITS[found[2] or "min"]
    else:
        rate = exact(value)
    if not 0 <= rate <= _LARGEST_RATE:
        raise ValueError(f"a rate must be from 0 to {_LARGEST_RATE} messages a minute")
    return rate


def exact(value: float) -> Fraction:
    """A number rounded to four decimals, so that sums of fractions stay short. Raises ValueError."""
    if not math.isfinite(value):
        raise ValueError("a number must be finite")
    return Fraction(round(value * 10_000), 10_000)


_Rate = Annotated[Fraction, BeforeValidator(parse_rate), PlainSerializer(float)]


class PhaseQuestion(Model):
    """A time with a constant load."""

    duration: Duration | None = Field(None, gt=0, le=MAX_DAYS * 86_400, description="None: always.")
    rate: _Rate = Field(description="Messages, e.g. 277/min, 12/s, 400000/day; a number: messages a minute.")
    events: float = Field(1.0, ge=0, le=1e6, description="Events in one message, on average.")
    message_size: Size = Field(1024, ge=0, le=2**40, description="Size of a message.")
    event_size: Size = Field(1024, ge=0, le=2**40, description="Size of an event.")

    def phase(self) -> Phase:
        minutes = Fraction(MINUTES_A_DAY) if self.duration is None else exact(self.duration) / 60
        return Phase(minutes, self.rate, exact(self.events), self.message_size, self.event_size)


class CapacityQuestion(Model):
    """A load, and the tiers that must hold it."""

    load: tuple[PhaseQuestion, ...] = Field(max_length=MAX_PHASES)
    start: Duration = Field(0.0, lt=86_400, description="When the load begins: time after 00:00 UTC.")
    repeats: bool = Field(False, description="Whether the load comes again every day.")
    hub: Literal["iot-hub-free", "iot-hub-s1", "iot-hub-s2", "iot-hub-s3"] = "iot-hub-s1"
    hub_units: int = Field(1, ge=1, le=200)
    store: Literal["store-s1", "store-s2"] | None = None
    store_units: int = Field(1, ge=1, le=10)
    max_lag: Duration = Field(60.0, description="How long an event may wait for the store.")
    retention_days: int | None = Field(
        None, ge=1, le=MAX_RETENTION_DAYS, description="For how many days the store must keep each event; None: any."
    )

    @field_validator("retention_days")
    @classmethod
    def _needs_a_store(cls, days: int | None, info: ValidationInfo) -> int | None:
        if days is not None and info.data.get("store", "invalid") is None:
            raise ValueError("only a store keeps events: give a store as well")
        return days

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.load:
            raise ValueError("load: at least one phase is needed")
        if len(self.load) > 1 and any(phase.duration is None for phase in self.load):
            raise ValueError("every phase needs a duration when there are several")
        if self.hub_units > (most := HUB_TIERS[self.hub].max_units):
            raise ValueError(f"{self.hub} has at most {most} units")
        seconds = sum(phase.duration or 0.0 for phase in self.load)
        if seconds > (86_400 if self.repeats else MAX_DAYS * 86_400):
            raise ValueError("a load that repeats has at most 24 hours" if self.repeats else f"at most {MAX_DAYS} days")
        return self

    def to_load(self) -> Load:
        phases = tuple(phase.phase() for phase in self.load)
        start = exact(self.start) / 60
        if self.load[0].duration is None:
            return Load.steady(phases[0])
        rest = MINUTES_A_DAY - sum(phase.minutes for phase in phases)
        if self.repeats and rest:
            phases += (Phase(Fraction(rest), Fraction(0)),)
        return Load(phases, start, self.repeats)


def answer(question: CapacityQuestion, prices: Mapping[str, float]) -> dict[str, Any]:
    """The plan for a question, as JSON values. `prices`: of a unit and month, by tier. Times are seconds after the
    load begins."""
    load, max_lag = question.to_load(), exact(question.max_lag) / 60
    hub = Hub(HUB_TIERS[question.hub], question.hub_units)
    store = None if question.store is None else Store(STORE_TIERS[question.store], question.store_units)
    days = question.retention_days
    found = plan(load, hub, store, max_lag=max_lag, retention_days=days)
    best = cheapest(load, prices, with_store=store is not None, max_lag=max_lag, retention_days=days)
    return {
        "fits": found.fits,
        "repeats": load.repeats,
        "accepted": float(found.accepted),
        "meters": _meters(found),
        "queue": _queue(found),
        "storage": _storage(found),
        "price": prices[hub.tier.name] * hub.units + (prices[store.tier.name] * store.units if store else 0.0),
        "cheapest": None if best is None else _choice(best),
        "notes": _notes(store, best),
    }


def _meters(found: Plan) -> list[dict[str, Any]]:
    return [
        {
            "meter": meter.name,
            "demand": float(meter.demand),
            "limit": float(meter.limit),
            "utilisation": float(meter.utilisation),
            "gives_out": None if meter.used_up_after is None else float(meter.used_up_after * 60),
            "excess": float(meter.excess),
        }
        for meter in found.meters
    ]


def _queue(found: Plan) -> dict[str, Any] | None:
    queue = found.queue
    if queue is None:
        return None
    return {
        "queued": float(queue.queued * 60),
        "worst_lag": float(queue.worst_lag * 60),
        "worst_events": float(queue.worst_events),
        "growth_a_minute": float(queue.growth),
        "drained": None if queue.drained is None else float(queue.drained * 60),
    }


def _storage(found: Plan) -> dict[str, Any] | None:
    storage = found.storage
    if storage is None:
        return None
    return {
        "events": storage.limit,
        "days": None if storage.days is None else float(storage.days),
        "needed": None if storage.needed is None else float(storage.needed),
    }


def _choice(best: Choice) -> dict[str, Any]:
    return {
        "hub": best.hub.tier.name,
        "hub_units": best.hub.units,
        "store": None if best.store is None else best.store.tier.name,
        "store_units": None if best.store is None else best.store.units,
        "price": best.price,
    }


def _notes(store: Store | None, best: Choice | None) -> list[str]:
    if store is None or best is None or best.store is None or best.store.tier.name == store.tier.name:
        return []
    return [f"A store cannot change from {store.tier.name} to {best.store.tier.name}: it must be created anew."]

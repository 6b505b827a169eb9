"""The counts of quotas in the form that is stored for the next leader. Pure."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from osrdyne.ingress.quotas.forecast import KEPT_DAYS, SLOTS
from osrdyne.ingress.quotas.window import StoredWindow

_LARGEST = 2**62


@dataclass(frozen=True, slots=True)
class CountedMeter:
    """The counts of one meter. `hashes` and `counts`: 8 bytes for each name."""

    name: str
    each: bool
    shared: bool
    used: int
    hashes: bytes = b""
    counts: bytes = b""
    names: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuotaState:
    """The counts of a day, and the record of use: of each day, this one last, blocks, messages and bytes by slot."""

    window: StoredWindow
    days: list[list[list[int]]]
    noon_forecast: float | None
    yesterdays_error: float | None
    meters: list[CountedMeter]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class _Meter(_Model):
    name: str
    each: bool
    shared: bool
    used: int = Field(ge=0, le=_LARGEST)
    hashes: str
    counts: str
    names: dict[int, str]


class _State(_Model):
    saved_at: float
    remaining: float
    scale: float = Field(gt=0, le=2)
    days: list[list[list[int]]] = Field(min_length=1, max_length=KEPT_DAYS + 1)
    noon_forecast: float | None
    yesterdays_error: float | None
    meters: list[_Meter]


def encode_state(state: QuotaState) -> dict[str, Any]:
    """The state as JSON values; `parse_state` reads them."""
    return {
        "saved_at": state.window.saved_at,
        "remaining": state.window.remaining,
        "scale": state.window.scale,
        "days": state.days,
        "noon_forecast": state.noon_forecast,
        "yesterdays_error": state.yesterdays_error,
        "meters": [
            {
                "name": meter.name,
                "each": meter.each,
                "shared": meter.shared,
                "used": meter.used,
                "hashes": b64encode(meter.hashes).decode("ascii"),
                "counts": b64encode(meter.counts).decode("ascii"),
                "names": {str(hashed): name for hashed, name in meter.names.items()},
            }
            for meter in state.meters
        ],
    }


def parse_state(value: object) -> QuotaState:
    """Read a stored state. Raises `ValueError` with the path of the first error."""
    try:
        found = _State.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if any(len(day) != 3 or any(len(row) != SLOTS for row in day) for day in found.days):
        raise ValueError("days: a day has 3 rows of 96 numbers")
    if any(not 0 <= value <= _LARGEST for day in found.days for row in day for value in row):
        raise ValueError("days: a number is out of bounds")
    return QuotaState(
        window=StoredWindow(found.saved_at, found.remaining, found.scale),
        days=found.days,
        noon_forecast=found.noon_forecast,
        yesterdays_error=found.yesterdays_error,
        meters=[_meter(meter) for meter in found.meters],
    )


def _meter(meter: _Meter) -> CountedMeter:
    try:
        hashes, counts = (b64decode(text, validate=True) for text in (meter.hashes, meter.counts))
    except binascii.Error as error:
        raise ValueError(f"{meter.name}: the counters are damaged") from error
    if len(hashes) != len(counts) or len(hashes) % 8:
        raise ValueError(f"{meter.name}: the counters are damaged")
    return CountedMeter(meter.name, meter.each, meter.shared, meter.used, hashes, counts, meter.names)

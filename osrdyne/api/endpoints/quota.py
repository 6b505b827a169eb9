"""The usage of quotas in `GET /v1/quota`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, Field

from osrdyne.ingress.quotas.quotas import Usage


class NameUsage(BaseModel):
    """The blocks that one key or principal has used."""

    name: str
    used: int


class MeterUsageModel(BaseModel):
    """The state of the pool's meter, or of that of a rule."""

    name: str
    used: int = Field(description="Blocks of this day; of the name with the largest use, if each has its own quota.")
    quota: int | None = Field(description="Blocks of this day; null: no daily quota.")
    ratio: float | None
    each: bool = Field(description="Whether each name has its own quota.")
    shared: bool = Field(description="Whether the names share the quota.")
    names: int = Field(description="The number of keys or principals that were counted.")
    largest: list[NameUsage]
    send_rate: float | None = Field(description="Messages a second; null: no limit.")
    burst: int | None


class ForecastModel(BaseModel):
    """Seconds until the quota of the pool is used up; null: not today, or unknown."""

    earliest: float | None
    latest: float | None
    by_history: float | None = Field(
        description="By the use at the same time of earlier days; null before there are two."
    )
    yesterdays_error: float | None = Field(
        description="Of the total that was forecast at noon, as a share of the real total."
    )


class DayUsage(BaseModel):
    """Use of a day in 96 parts of 15 minutes."""

    blocks: list[int]
    messages: list[int]
    bytes: list[int]


class QuotaUsage(BaseModel):
    """The state of all quotas."""

    remaining: float = Field(description="Seconds until the quotas are reset.")
    meters: list[MeterUsageModel]
    forecast: ForecastModel | None = Field(description="Null in a pool without a daily quota of its own.")
    days: list[DayUsage] = Field(description="The last days, this one last.")


def shown_usage(usage: Usage) -> dict[str, Any]:
    """The usage as JSON values of `QuotaUsage`."""
    return {
        "remaining": usage.remaining,
        "meters": [
            asdict(meter)
            | {"ratio": meter.ratio, "largest": [{"name": name, "used": used} for name, used in meter.largest]}
            for meter in usage.meters
        ],
        "forecast": None if usage.forecast is None else asdict(usage.forecast),
        "days": [dict(zip(("blocks", "messages", "bytes"), day, strict=True)) for day in usage.days],
    }

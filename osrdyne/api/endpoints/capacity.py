"""Capacity plans over HTTP: `POST /v1/capacity`. A calculation, which changes nothing and needs no leader."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, Field

from osrdyne.ingress.quotas.question import CapacityQuestion, answer
from osrdyne.pool.views import PoolInspector

MAX_PLANS = 32
"""Plans that may wait or run at once. A plan of the largest load takes about a second."""


class MeterPlan(BaseModel):
    """The demand of the load on one limit."""

    meter: str
    demand: float
    limit: float
    utilisation: float = Field(description="Demand divided by limit.")
    gives_out: float | None = Field(description="Seconds after the load begins; null: never.")
    excess: float = Field(description="Messages that are refused; of the store, the most events that wait.")


class QueuePlan(BaseModel):
    """The queue before the store."""

    queued: float = Field(description="Seconds in which events wait.")
    worst_lag: float = Field(description="Seconds that the latest event waits.")
    worst_events: float
    growth_a_minute: float = Field(description="By how many events a minute the queue grows at most.")
    drained: float | None = Field(description="Seconds after the load begins; null: never.")


class StoragePlan(BaseModel):
    """What the store keeps; when it is full, it removes the oldest events."""

    events: int = Field(description="Events that it keeps.")
    days: float | None = Field(
        description="For how long it keeps events; null: the load does not repeat, or nothing is stored."
    )
    needed: float | None = Field(description="Events of the retention that was asked for; null: none was.")


class ChoicePlan(BaseModel):
    """The cheapest tiers and units that hold the load."""

    hub: str
    hub_units: int
    store: str | None
    store_units: int | None
    price: float = Field(description="Per month.")


class CapacityPlan(BaseModel):
    """The answer to a question about capacity."""

    fits: bool
    repeats: bool = Field(description="Whether the load comes again every day.")
    accepted: float = Field(description="Messages that the hub accepts; of a load that repeats, in a day.")
    meters: list[MeterPlan]
    queue: QueuePlan | None
    storage: StoragePlan | None
    price: float = Field(description="Of the tiers in the question, per month.")
    cheapest: ChoicePlan | None
    notes: list[str]


def capacity_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")
    # In a thread of their own, one at a time: many plans must not occupy the threads that verify tokens.
    thread = ThreadPoolExecutor(1, thread_name_prefix="capacity")
    plans = 0

    @router.post(
        "/capacity", summary="Whether tiers hold a load, and the cheapest that do", response_model=CapacityPlan
    )
    async def capacity(question: CapacityQuestion) -> dict[str, Any]:
        nonlocal plans
        if plans >= MAX_PLANS:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MAX_PLANS} plans are being computed; try again in some seconds.",
                headers={"retry-after": "5"},
            )
        plans += 1
        running = asyncio.get_running_loop().run_in_executor(thread, answer, question, inspector.prices)
        try:
            return await running
        finally:
            plans -= 1

    return router

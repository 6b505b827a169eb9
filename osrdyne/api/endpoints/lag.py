"""The lag of the groups of a pool: `GET /v1/lag`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from osrdyne.api.access.checks import principal_of
from osrdyne.auth.grants import Grant
from osrdyne.pool.state.queues.lag import Lag
from osrdyne.pool.views import PoolInspector


class LagFigures(BaseModel):
    """The lag of the pool, or of a group."""

    messages: int = Field(description="Requests that no worker has taken.")
    seconds: float | None = Field(description="Age of the oldest of them; null: not known.")
    a_minute: float | None = Field(
        description="Growth of their number in a minute; negative: they become fewer; null: not known before a "
        "second listing."
    )
    drained_in: float | None = Field(
        description="Seconds after `as_of` until none wait, at that rate; null: never, or `a_minute` is not known."
    )

    @classmethod
    def of(cls, lag: Lag) -> LagFigures:
        a_minute = None if lag.slope is None else 60 * lag.slope
        return cls(messages=lag.messages, seconds=lag.seconds, a_minute=a_minute, drained_in=lag.drained_in)


class GroupLag(LagFigures):
    """The lag of one group."""

    key: str


class PoolLag(BaseModel):
    """The lag of a pool, and of the groups in which requests wait, the oldest first."""

    pool: str
    leading: bool
    as_of: float | None = Field(
        description="When the queues were listed, seconds since the epoch; all figures are of this time. null: not "
        "yet, or not leading."
    )
    total: LagFigures | None = Field(
        description="Of all groups; null while not leading, and for a token that may not see all keys."
    )
    groups: list[GroupLag]


def lag_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/lag", summary="The number of waiting requests, their age, and the trend")
    async def lag(request: Request) -> PoolLag:
        principal = principal_of(request)
        may = principal.may
        lags = inspector.lags()
        total = lags.pool
        if principal.is_limited(Grant.VIEW):
            total = None
        shown = [
            GroupLag(key=one.key, **LagFigures.of(one).model_dump())
            for one in lags.groups
            if one.key is not None and may(Grant.VIEW, one.key)
        ]
        figures = None if total is None else LagFigures.of(total)
        return PoolLag(
            pool=inspector.pool,
            leading=inspector.leadership().leading,
            as_of=lags.as_of,
            total=figures,
            groups=shown,
        )

    return router

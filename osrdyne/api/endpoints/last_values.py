"""The last values of a key: `GET /v1/last`. Answered by any daemon that can use the store, also by a standby."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Self

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from osrdyne.api.access.checks import protected
from osrdyne.api.keys import key_schema, query_key
from osrdyne.pool.views import PoolInspector
from osrdyne.protocol.names import Key
from osrdyne.telemetry.last_values.values import LastValue

MAX_LIMIT = 1_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LastValueModel(BaseModel):
    """The newest event of a series."""

    series: str
    ts: datetime = Field(description="When it happened.")
    sent_ts: datetime | None = Field(
        description="The time that the device sent, if it was too far in the future; `ts` is then `enqueued`."
    )
    kind: str
    value: float | None = Field(description="Number, or true and false as 1 and 0.")
    value_text: str | None = Field(description="Text.")
    quality: str | None
    attributes: dict[str, str | None]
    enqueued: datetime = Field(description="When the ingress took the message.")
    partition: int
    offset: int
    index: int = Field(description="Number of the event in its message.")
    message_id: str | None

    @classmethod
    def of(cls, value: LastValue) -> Self:
        return cls(
            series=value.series,
            ts=_time(value.ts),
            sent_ts=None if value.sent_ts is None else _time(value.sent_ts),
            kind=value.kind,
            value=value.value,
            value_text=value.value_text,
            quality=value.quality,
            attributes={} if value.attributes is None else json.loads(value.attributes),
            enqueued=_time(value.enqueued),
            partition=value.log_partition,
            offset=value.log_offset,
            index=value.log_index,
            message_id=value.message_id,
        )


class LastValuesModel(BaseModel):
    """Last values of a key, by series."""

    key: str
    values: list[LastValueModel]
    next: str | None = Field(description="Series for `after` of the next page; null on the last page.")


def last_value_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1", dependencies=[protected(inspector, query_key)])

    @router.get(
        "/last",
        summary="The last values of a key, of one series or of all, page by page",
        openapi_extra=key_schema("query"),
    )
    async def last(
        key: Annotated[Key, Depends(query_key)],
        series: Annotated[str | None, Query(min_length=1, description="Only this series.")] = None,
        after: Annotated[str | None, Query(description="Only series after this one: `next` of the last page.")] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of values.")] = 100,
    ) -> LastValuesModel:
        page = await inspector.last_values(key, series=series, after=after, limit=limit)
        return LastValuesModel(key=key, values=[LastValueModel.of(one) for one in page.values], next=page.following)

    return router


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)

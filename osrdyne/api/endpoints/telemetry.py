"""The log of telemetry and the lag of its readers: `GET /v1/telemetry`."""

from __future__ import annotations

import math

from fastapi import APIRouter
from pydantic import BaseModel, Field

from osrdyne.pool.views import PoolInspector
from osrdyne.telemetry.forecast import Forecast
from osrdyne.telemetry.status import LogStatus, total_lag


class PartitionModel(BaseModel):
    """One partition of the log."""

    partition: int
    stream: str
    first: int | None = Field(description="First offset; null: the partition has no message.")
    next: int = Field(description="Offset after the last message.")
    messages: int = Field(description="Offsets between them; a few have no message.")


class PartitionLag(BaseModel):
    """The lag of a reader in one partition."""

    partition: int
    position: int = Field(description="Next offset that the reader will read.")
    messages: int = Field(description="Message Count Lag.")
    seconds: float | None = Field(description="Message Time Lag; null: not known.")
    lost: int = Field(description="Offsets that the retention removed before they were read.")


class ForecastModel(BaseModel):
    """How the lag of a reader changes."""

    rate_in: float = Field(description="Messages a minute that the log receives.")
    rate_out: float = Field(description="Messages a minute that the reader reads.")
    drained: float | None = Field(description="Seconds until it has read everything at these rates; null: never.")
    grows: bool = Field(description="Whether the lag has grown for ten minutes.")


class ReaderModel(BaseModel):
    """The lag of a reader that has stored its position."""

    reader: str
    at: float = Field(description="When it stored its position, seconds since the epoch.")
    messages: int = Field(description="Message Count Lag of all partitions together.")
    seconds: float | None = Field(description="Message Time Lag: of the partition that is furthest behind.")
    forecast: ForecastModel | None = Field(description="Null until it has been measured for a minute.")
    partitions: list[PartitionLag]


class TablePartitionModel(BaseModel):
    """The state of one partition of a table in the scheduler."""

    partition: int
    in_flight: bool = Field(description="Whether a request to store it waits for its answer.")
    stored: int = Field(description="Events by the answers in the term of this leader.")
    invalid: int = Field(description="Invalid events among them.")
    failures: int = Field(description="Consecutive failed requests.")
    code: str | None = Field(description="Code of the last of them.")
    error: str | None = Field(description="Its cause and remedy.")
    next_after: float | None = Field(description="Seconds until the next request at the earliest; null: now.")


class TableModel(BaseModel):
    """A table for which the leader requests ingests (`telemetry.tables`)."""

    table: str
    pool: str = Field(description="Pool whose workers store it.")
    target_lag: float
    partitions: list[TablePartitionModel]


class TelemetryStatus(BaseModel):
    """The log of a pool; `name` null: the pool has none."""

    name: str | None
    partitions: list[PartitionModel] = []
    readers: list[ReaderModel] = []
    tables: list[TableModel] = []


def telemetry_routes(inspector: PoolInspector) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/telemetry", summary="The partitions of the log of telemetry, and the lag of its readers")
    async def telemetry() -> TelemetryStatus:
        return shown_status(await inspector.telemetry())

    return router


def shown_status(status: LogStatus | None) -> TelemetryStatus:
    if status is None:
        return TelemetryStatus(name=None)
    readers = []
    for reader in dict.fromkeys(one.reader for one in status.lags):
        lags = [one for one in status.lags if one.reader == reader]
        messages, seconds = total_lag(lags)
        shown = [
            PartitionLag(
                partition=one.partition,
                position=one.position,
                messages=one.messages,
                seconds=one.seconds,
                lost=one.lost,
            )
            for one in lags
        ]
        readers.append(
            ReaderModel(
                reader=reader,
                at=lags[0].at,
                messages=messages,
                seconds=seconds,
                forecast=_forecast(status.forecasts.get(reader)),
                partitions=shown,
            )
        )
    partitions = [
        PartitionModel(
            partition=one.partition, stream=one.stream, first=one.first, next=one.next, messages=one.messages
        )
        for one in status.partitions
    ]
    tables = [
        TableModel(
            table=table.name,
            pool=table.pool,
            target_lag=table.target_lag,
            partitions=[
                TablePartitionModel(
                    partition=one.partition,
                    in_flight=one.in_flight,
                    stored=one.stored,
                    invalid=one.invalid,
                    failures=one.failures,
                    code=one.code,
                    error=one.error,
                    next_after=one.pause,
                )
                for one in table.partitions
            ],
        )
        for table in status.tables
    ]
    return TelemetryStatus(name=status.name, partitions=partitions, readers=readers, tables=tables)


def _forecast(found: Forecast | None) -> ForecastModel | None:
    if found is None:
        return None
    drained = None if math.isinf(found.drained) else found.drained
    return ForecastModel(rate_in=found.rate_in, rate_out=found.rate_out, drained=drained, grows=found.grows)

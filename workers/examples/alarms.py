"""A worker without Spark that handles alarms: it logs each one at once, and shows those that are open.

osrdyne-worker workers.examples.alarms:app

A route sends alarms to the group of their key with the highest priority, and another one writes them to the log of
telemetry as well. See docs/how-to/handle-alarms.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from osrdyne.logs import get_logger
from osrdyne_worker import App, Call, Context

log = get_logger(__name__)
app = App(poolable=True)


class Alarm(BaseModel):
    """An event of telemetry with the kind `alarm`; it may have further fields."""

    model_config = ConfigDict(extra="allow")

    series: str
    value: float | str | None = None
    ts: str | float | None = None


@dataclass
class OpenAlarms:
    """The newest alarm of each series, until it is acknowledged. It is in memory only: a new worker begins without."""

    by_series: dict[str, Alarm] = field(default_factory=dict)


@app.on_start
def begin(context: Context) -> OpenAlarms:
    return OpenAlarms()


@app.handler("/alarm")
async def alarm(call: Call, request: Alarm) -> dict[str, Any]:
    """Raise an alarm. Here a handler would notify someone; a request that is delivered again raises it again."""
    alarms: OpenAlarms = call.context.state
    alarms.by_series[request.series] = request
    log.warning("alarm raised", key=call.context.key, series=request.series, value=request.value)
    return {"raised": request.series, "open": len(alarms.by_series)}


@app.handler("/alarms")
async def open_alarms(call: Call) -> dict[str, Any]:
    """The open alarms of the key."""
    alarms: OpenAlarms = call.context.state
    return {"open": [one.model_dump() for one in alarms.by_series.values()]}


@app.handler("/acknowledge")
async def acknowledge(call: Call, request: Alarm) -> dict[str, int]:
    """Close the alarm of a series."""
    alarms: OpenAlarms = call.context.state
    alarms.by_series.pop(request.series, None)
    return {"open": len(alarms.by_series)}

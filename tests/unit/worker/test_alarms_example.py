"""The example of an alarm handler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context
from workers.examples import alarms


@pytest.fixture
def call() -> Call:
    context = Context(key=Key("site/pump"), pool="plant")
    return Call(replace(context, state=alarms.begin(context)), Request(key="site/pump", body=b"", headers={}))


async def test_newest_alarm_of_a_series_is_open_until_it_is_acknowledged(call: Call) -> None:
    for series, value in (("pressure", 8.0), ("flow", 1.0), ("pressure", 9.0)):
        answer = await alarms.alarm(call, alarms.Alarm(series=series, value=value, kind="alarm"))
    assert answer == {"raised": "pressure", "open": 2}
    assert await alarms.acknowledge(call, alarms.Alarm(series="flow")) == {"open": 1}
    [one] = (await alarms.open_alarms(call))["open"]
    assert (one["series"], one["value"], one["kind"]) == ("pressure", 9.0, "alarm")

"""A memory or disk alarm of RabbitMQ in the components of a daemon that does not lead."""

from unittest.mock import Mock, PropertyMock

import pytest

from osrdyne.broker.session import LeaderSession
from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection, connect_to
from osrdyne.testing.fakes.stack import POOL, leading, settings_for


def alarms(state: DaemonState, clock: VirtualClock) -> list[tuple[bool, bool]]:
    parts = {name: Mock() for name in ("driver", "management", "pins", "leader")}
    inspector = DaemonInspector(pool=POOL, state=state, prices={}, clock=clock, **parts)
    return [(one.ok, one.fatal) for one in inspector.components() if one.name == "alarm"]


@pytest.mark.proves("broker/memory-disk-alarm")
async def test_leader_and_standby_name_an_alarm_as_long_as_it_lasts(clock, broker, monkeypatch):
    async with (
        leading(clock) as stack,
        LeaderSession(settings_for(), clock=clock, connect=connect_to(broker)) as standby,
    ):
        state = DaemonState(session=standby)
        state.note("broker", ok=True, detail="connected")
        for one in (state, DaemonState(term=stack.term)):
            seen = []
            for blocked in (False, True, False):
                monkeypatch.setattr(FakeConnection, "is_blocked", PropertyMock(return_value=blocked))
                seen.append(alarms(one, clock))
            assert seen == [[], [(False, False)], []]

"""A memory or disk alarm of RabbitMQ in the components of the daemon."""

from __future__ import annotations

from unittest.mock import Mock, PropertyMock

import pytest

from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.stack import POOL, leading


@pytest.mark.proves("broker/memory-disk-alarm")
async def test_alarm_is_a_component_as_long_as_it_lasts(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(clock) as stack:
        inspector = DaemonInspector(
            pool=POOL,
            state=DaemonState(term=stack.term),
            driver=stack.driver,
            management=stack.management,
            pins=Mock(),
            leader=Mock(),
            prices={},
            clock=clock,
        )
        seen = []
        for blocked in (False, True, False):
            monkeypatch.setattr(FakeConnection, "is_blocked", PropertyMock(return_value=blocked))
            seen.append([(one.ok, one.fatal) for one in inspector.components() if one.name == "alarm"])
        assert seen == [[], [(False, False)], []]

"""Fixtures of the tests of processors: a broker with a queue for answers."""

from __future__ import annotations

import pytest
from replies import broker_with_replies

from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker


@pytest.fixture
def broker(clock: VirtualClock) -> FakeBroker:
    return broker_with_replies(clock)

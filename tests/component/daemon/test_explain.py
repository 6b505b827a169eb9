"""`explain` in a pool with many routes."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
from managed_pool import REST, managing

from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.ingress import explain as module
from osrdyne.ingress.conditions import Sample
from osrdyne.ingress.requests import sample_arrival
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL


async def test_thousands_of_routes_are_explained_in_a_thread(
    clock: VirtualClock, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A condition that is undefined is parsed once more, to name the part without a value."""
    threads = set()

    def undefined_part(text: str, sample: Sample) -> str:
        threads.add(threading.current_thread().name)
        return "level"

    monkeypatch.setattr(module, "undefined_part", undefined_part)
    route = {"route": "FROM /messages/* WHERE level > 'a' INTO $upstream", "priority": 0}
    async with managing(clock, broker, **{f"r{number}": route for number in range(200)}, rest=REST) as stack:
        state = DaemonState(term=stack.term)
        inspector = DaemonInspector(
            pool=POOL,
            state=state,
            driver=stack.driver,
            management=stack.management,
            pins=Mock(),
            leader=Mock(),
            prices={},
            clock=clock,
        )
        arrival = sample_arrival("k", "/p", headers={}, body=None, app_id=None, timeout=None, now=clock.time())
        explanation = await inspector.explain(arrival)
    assert [one.name for one in explanation.routes if one.wins] == ["rest"]
    assert [one.undefined for one in explanation.routes].count("level") == 200
    assert threading.current_thread().name not in threads

"""What the daemon answers beside its work: the reload of a group's data on request, and `explain`."""

import asyncio
import threading
from typing import Any

import pytest
from inspectors import inspector_of
from managed_pool import REST, managing

from osrdyne.daemon.inspector import MAX_RELOADS, DaemonInspector
from osrdyne.errors import PoolConflictError
from osrdyne.ingress import explain
from osrdyne.ingress.requests import sample_arrival
from osrdyne.pool.views import ReloadOutcome
from osrdyne.protocol.activity import RELOADS_FIELD, Event
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.stack import leading

A = Key("a")


class Watched(DaemonInspector):
    checks = 0

    def _reload_outcome(self, *arguments: Any) -> Any:
        self.checks += 1
        self.asked = arguments[-1]
        return super()._reload_outcome(*arguments)


@pytest.fixture
async def stack(clock, broker):
    async with leading(clock, broker=broker) as stack:
        await stack.publish("a", b"1")
        await clock.settle()
        await stack.report("a", Event.READY)
        yield stack


@pytest.fixture
def inspector(stack):
    return inspector_of(stack, Watched)


async def test_outcome_of_each_worker_is_found_without_polling_it_all_the_time_until_the_time_limit(stack, inspector):
    waiting = asyncio.create_task(inspector.reload_group(A, timeout=600))
    await stack.clock.advance(120.0)
    assert not waiting.done()
    assert 100 <= inspector.checks <= 200, "about one a second"
    await stack.report("a", Event.READY, **{RELOADS_FIELD: {inspector.asked: None}})
    await stack.clock.advance(2.0)
    assert [one.outcome for one in await waiting] == [ReloadOutcome.RELOADED]
    waiting, inspector.checks = asyncio.create_task(inspector.reload_group(A, timeout=7.5)), 0
    await stack.clock.advance(7.0)
    assert not waiting.done()
    await stack.clock.advance(50.0)
    assert [one.outcome for one in await waiting] == [ReloadOutcome.UNKNOWN]
    assert inspector.checks < 20


async def test_number_of_reloads_that_are_waited_for_is_limited(stack, inspector):
    waiting = [asyncio.create_task(inspector.reload_group(A, timeout=30)) for _ in range(MAX_RELOADS)]
    await stack.clock.settle()
    with pytest.raises(PoolConflictError):
        await inspector.reload_group(A, timeout=30)
    waiting.pop().cancel()
    await stack.clock.settle()
    waiting.append(asyncio.create_task(inspector.reload_group(A, timeout=30)))
    await stack.clock.advance(60.0)
    assert {one.outcome for task in waiting for one in await task} == {ReloadOutcome.UNKNOWN}


async def test_thousands_of_routes_are_explained_in_a_thread(clock, broker, monkeypatch):
    """A condition that is undefined is parsed once more, to name the part without a value."""
    threads = set()

    def undefined_part(text, sample):
        threads.add(threading.current_thread().name)
        return "level"

    monkeypatch.setattr(explain, "undefined_part", undefined_part)
    route = {"route": "FROM /messages/* WHERE level > 'a' INTO $upstream", "priority": 0}
    async with managing(clock, broker, **{f"r{number}": route for number in range(200)}, rest=REST) as stack:
        arrival = sample_arrival("k", "/p", headers={}, body=None, app_id=None, timeout=None, now=clock.time())
        explanation = await inspector_of(stack, DaemonInspector).explain(arrival)
    assert [one.name for one in explanation.routes if one.wins] == ["rest"]
    assert [one.undefined for one in explanation.routes].count("level") == 200
    assert threading.current_thread().name not in threads

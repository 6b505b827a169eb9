"""What the daemon answers beside its work: the reload of a group's data on request, and `explain`."""

import asyncio
from typing import Any

import pytest
from inspectors import inspector_of

from osrdyne.daemon.inspector import MAX_RELOADS, DaemonInspector
from osrdyne.errors import PoolConflictError
from osrdyne.pool.views import ReloadOutcome
from osrdyne.processors.replies import COMPONENT
from osrdyne.protocol.activity import FULL_QUEUE, NO_PERMISSION, RELOADS_FIELD, WAITING_ANSWERS_FIELD, Event
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


async def test_waiting_answers_of_workers_are_a_component(stack, inspector):
    async def reported(event: Event, **details: object) -> list[str]:
        await stack.report("a", event, **details)
        return [one.detail for one in inspector.components() if one.name == COMPONENT]

    for count in ("1", -1, 10**9):
        assert await reported(Event.BUSY, **{WAITING_ANSWERS_FIELD: {FULL_QUEUE: count}}) == []
    [detail] = await reported(Event.BUSY, **{WAITING_ANSWERS_FIELD: {FULL_QUEUE: 31, NO_PERMISSION: 42, "other": 53}})
    assert ("31" in detail, "42" in detail, "53" in detail) == (True, True, False)
    assert await reported(Event.IDLE) == []


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

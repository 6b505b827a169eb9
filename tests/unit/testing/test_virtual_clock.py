"""The virtual clock itself: every test of a loop depends on it."""

from __future__ import annotations

import asyncio

import pytest

from osrdyne.testing.clock import VirtualClock


async def test_advance_wakes_sleepers_in_order_of_their_time_and_loops_as_often_as_they_are_due() -> None:
    clock = VirtualClock(monotonic=0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async def tick() -> None:
        while True:
            await sleeper("tick", 2.0)

    async with asyncio.TaskGroup() as group:
        for name, seconds in [("late", 5.0), ("early", 1.0), ("also early", 1.0)]:
            group.create_task(sleeper(name, seconds))
        ticks = asyncio.create_task(tick())
        await clock.advance(5)
        ticks.cancel()
    assert woken == [("early", 1.0), ("also early", 1.0), ("tick", 2.0), ("tick", 4.0), ("late", 5.0)]


async def test_call_later_calls_at_its_time_unless_it_is_cancelled() -> None:
    clock = VirtualClock()
    called: list[str] = []
    clock.call_later(5, lambda: called.append("cancelled")).cancel()
    clock.call_later(5, lambda: called.append("in time"))
    await clock.advance(4.9)
    assert (called, clock.pending) == ([], [pytest.approx(0.1)])
    await clock.advance(0.1)
    assert (called, clock.pending) == (["in time"], [])


async def test_cancelled_sleeper_is_forgotten_also_at_the_moment_of_its_end() -> None:
    clock = VirtualClock()
    early, victim = (asyncio.create_task(clock.sleep(5)) for _ in range(2))

    async def killer() -> None:
        await clock.sleep(5)
        victim.cancel()

    task = asyncio.create_task(killer())
    await clock.settle()
    early.cancel()
    await clock.advance(6)
    assert task.done()
    assert early.cancelled()
    assert victim.done()
    assert clock.pending == []

"""The virtual clock, and the event loop of histories, which never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing

import pytest

from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.loop import MemoryLoop


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


@pytest.fixture
def loop() -> Iterator[MemoryLoop]:
    with closing(MemoryLoop()) as loop:
        yield loop


async def work_of_three(clock: VirtualClock) -> list[str]:
    """Tasks that hand one another turns in every way, one of which is cancelled; what they did, in order."""
    said: list[str] = []
    queue: asyncio.Queue[int] = asyncio.Queue(1)
    lock = asyncio.Lock()

    async def produce() -> None:
        for number in range(5):
            await queue.put(number)
            said.append(f"put {number}")

    async def consume(name: str) -> None:
        try:
            while True:
                async with lock:
                    said.append(f"{name} took {await queue.get()}")
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            said.append(f"{name} is over")

    tasks = [asyncio.ensure_future(one) for one in (consume("a"), produce(), consume("b"))]
    await clock.settle()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return said


def test_tasks_take_turns_as_on_a_loop_of_asyncio(loop: MemoryLoop) -> None:
    said = loop.run_until_complete(work_of_three(VirtualClock()))
    assert said == asyncio.run(work_of_three(VirtualClock()))
    assert len(said) == 12


async def wait_endlessly() -> None:
    await asyncio.get_running_loop().create_future()


async def spin() -> None:
    while True:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("never_ending", "why"), [(wait_endlessly, "Every task waits"), (spin, "spins")])
def test_endless_coroutine_is_an_error_and_leaves_no_task(
    loop: MemoryLoop,
    monkeypatch: pytest.MonkeyPatch,
    never_ending: Callable[[], Coroutine[None, None, None]],
    why: str,
) -> None:
    monkeypatch.setattr("osrdyne.testing.fakes.loop._MAX_ROUNDS", 100)
    with pytest.raises(RuntimeError, match=why):
        loop.run_until_complete(never_ending())
    loop.run_until_complete(asyncio.sleep(0))
    assert loop.unfinished() == []

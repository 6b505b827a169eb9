"""The event loop of histories: it runs what asyncio's own loop would run, in the same order, and never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing

import pytest

from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.loop import MemoryLoop


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

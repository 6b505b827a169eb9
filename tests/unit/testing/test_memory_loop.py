"""The event loop of histories: it runs what asyncio's own loop would run, in the same order, and never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from contextvars import ContextVar

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


def test_task_that_still_waits_in_the_end_is_unfinished_and_one_that_is_ending_is_not(loop: MemoryLoop) -> None:
    left: list[asyncio.Task[None]] = []

    async def history() -> None:
        left.extend(asyncio.ensure_future(wait_endlessly()) for _ in range(2))
        await asyncio.sleep(0)
        left[0].cancel()

    loop.run_until_complete(history())
    assert loop.unfinished() == left[1:]
    left[1].cancel()
    loop.run_until_complete(asyncio.sleep(0))
    assert left[1].cancelled()


def test_task_keeps_its_own_context(loop: MemoryLoop) -> None:
    name: ContextVar[str] = ContextVar("name", default="nameless")
    seen: list[str] = []

    async def say(own: str) -> None:
        name.set(own)
        await asyncio.sleep(0)
        seen.append(name.get())

    async def history() -> None:
        await asyncio.gather(say("a"), say("b"))

    loop.run_until_complete(history())
    assert [*seen, name.get()] == ["a", "b", "nameless"]


def test_time_of_the_machine_never_passes(loop: MemoryLoop) -> None:
    async def history() -> bool:
        async with asyncio.timeout(1e-9):
            for _ in range(1000):
                await asyncio.sleep(0)
        return True

    assert loop.run_until_complete(history())

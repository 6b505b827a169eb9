"""What other tests rely on: the event loop of histories, the in-memory driver, tables of cases."""

import asyncio
from contextlib import closing

import pytest
from case_tables import failures

from osrdyne.drivers.base import DriverContext, DriverOptions, InstanceState
from osrdyne.drivers.noop import NoopDriver
from osrdyne.errors import StartFailedError
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.driver_conformance import KEY, make_spec
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.loop import MemoryLoop


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


def test_tasks_take_turns_as_on_a_loop_of_asyncio():
    with closing(MemoryLoop()) as loop:
        said = loop.run_until_complete(work_of_three(VirtualClock()))
    assert said == asyncio.run(work_of_three(VirtualClock()))
    assert len(said) == 12


@pytest.mark.proves("reference-defects/11-reconnection-restarted-every")
async def test_stubborn_worker_is_killed_after_the_grace(clock):
    driver = FakeDriver(clock, pool=make_spec().pool)
    instance = await driver.start(make_spec())
    [worker] = driver.workers_of(KEY)
    worker.stubborn = True
    async with asyncio.TaskGroup() as group:
        group.create_task(driver.stop(instance.instance_id, grace=30.0), name="stop")
        await clock.advance(29.9)
        assert worker.instance.state is InstanceState.STOPPING
        await clock.advance(0.1)
    assert worker.instance.exit.signal == "SIGKILL"


async def test_noop_refuses_to_start_and_names_the_remedy(clock):
    noop = NoopDriver(DriverOptions(), DriverContext(pool="p", stack="s", clock=clock, worker_command=()))
    with pytest.raises(StartFailedError, match="osrdyne groups env KEY"):
        await noop.start(make_spec())


def test_every_case_that_fails_is_reported():
    def check(case):
        assert case
        if case == 1:
            with pytest.raises(ValueError):
                pass

    assert list(failures([0, 1, 2], check)) == ["0", "1"]
    with pytest.raises(ValueError):
        failures([], check)

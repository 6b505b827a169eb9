"""Every race of the OSRD reference, forced: something happens at each single step of a group's beginning and end.

A step is a command that concerns the group's queue, before it takes effect or before it is answered. In the first run
something happens at the first of them, in the next run at the second, and so on. In the end every confirmed request has
an outcome, no busy worker was stopped, and nothing is left over.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from broker_steps import kill_within
from lifecycle_world import KEY, QUEUE, World

from osrdyne.errors import StartFailedError
from osrdyne.testing.fakes.broker import Command

REST = 120.0
"""Seconds in which an idle group comes to its end, twice over."""

History = Callable[[World], Awaitable[None]]


class Step:
    """Matches the command that is the `number`-th until the queue is deleted."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.over = False

    def __call__(self, command: Command) -> bool:
        if self.over or (command.target != QUEUE and command.name not in {"list_queues", "publish", "ack"}):
            return False
        self.count += 1
        self.over = command == ("delete", QUEUE, True)
        return self.count == self.number


def request(world: World) -> None:
    """A client publishes; its request reaches a queue half a second later."""
    world.broker.transit = 0.5
    world.send(b"2")


def crash(world: World, *, unnoticed: bool = False) -> None:
    if world.driver.workers_of(KEY):
        world.crash(unnoticed=unnoticed)


EVENTS: dict[str, Callable[[World], object]] = {
    "request": request,
    "late report": World.report,
    "worker crash": crash,
    "unnoticed crash": lambda world: crash(world, unnoticed=True),  # its host is gone; RabbitMQ finds out later
    "worker cut off": World.cut_worker,  # it connects again a second later
    "leader cut off": World.cut,
    "leader killed": lambda world: kill_within(world.leader),  # nothing is finished, nothing closed in order
    "end": World.retire,
}


async def first_request(world: World) -> None:
    """A group comes up for its first request."""
    world.send(b"1")


async def end(world: World) -> None:
    """A group that has served goes away."""
    world.send(b"1")
    await world.clock.advance(5)
    world.retire()


async def slow_end(world: World) -> None:
    """A group goes away whose worker ends only when it is killed, half a minute later."""
    world.send(b"1")
    await world.clock.advance(5)
    for worker in world.driver.workers_of(KEY):
        worker.stubborn = True
    world.retire()


async def request_while_the_worker_is_stopped(world: World) -> None:
    """The same, and a request comes in the middle of it."""
    await slow_end(world)
    await world.clock.advance(30)
    world.send(b"3")


async def end_with_a_request_at_work(world: World) -> None:
    """A group is to go away while its worker is at work."""
    world.hold.add(b"1")
    world.send(b"1")
    await world.clock.advance(5)
    world.retire()
    await world.clock.advance(40)
    world.release()


async def failed_start(world: World) -> None:
    """The request of a group that cannot start is answered; the next one starts it."""
    world.driver.fail_next_start(StartFailedError("There is no such image."))
    world.send(b"1")
    await world.clock.advance(30)
    world.send(b"2")


async def dead_letter(world: World) -> None:
    """A request expires in the queue of a group whose worker is at work."""
    world.hold.add(b"1")
    world.send(b"1")
    world.send(b"2")
    await world.clock.advance(5)
    if QUEUE in world.broker.queues:
        world.broker.expire(QUEUE)
    await world.clock.advance(5)
    world.release()


SLOW_END = ("request", "late report", "leader cut off")
CASES: dict[History, tuple[str, ...]] = {
    first_request: ("request", "worker crash", "worker cut off", "leader cut off", "end", "leader killed"),
    end: (*SLOW_END, "worker crash", "unnoticed crash", "worker cut off", "leader killed"),
    slow_end: SLOW_END,
    request_while_the_worker_is_stopped: SLOW_END,
    failed_start: ("leader killed",),
    dead_letter: ("leader killed",),
    end_with_a_request_at_work: ("request", "unnoticed crash", "worker cut off", "leader cut off"),
}


async def live_through(history: History, event: str, number: int) -> bool:
    """Whether there was such a step. No task is left in the end."""
    before = asyncio.all_tasks()
    world, step = World(), Step(number)

    async def happen() -> None:
        EVENTS[event](world)
        await world.pass_on()

    await world.lead()
    world.once(step, happen)
    try:
        await history(world)
        await world.rest(REST)
        assert world.faults() == set(), f"{event} at step {number}"
    finally:
        await world.close()
    assert asyncio.all_tasks() - before == set(), f"{event} at step {number}"
    return step.count >= number


@pytest.mark.proves("controller/leader-killed")
@pytest.mark.parametrize(
    ("history", "event"),
    [
        pytest.param(history, event, id=f"{history.__name__}-{event}")
        for history, events in CASES.items()
        for event in events
    ],
)
async def test_no_request_is_lost_with_any_event_at_any_step(history, event):
    for number in itertools.count(1):
        if not await live_through(history, event, number):
            break
    assert number > 10

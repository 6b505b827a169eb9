"""Every race of the OSRD reference, forced: something happens at each single step of a group's beginning and end.

A step is a command that concerns the group's queue, before it takes effect or before it is answered. In the first run
something happens at the first of them, in the next run at the second, and so on. In the end every confirmed request has
an outcome, no busy worker was stopped, and nothing is left over.
"""

from __future__ import annotations

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
    """Matches the command that is the `number`-th until the queue is deleted; `reached`: there was one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.over = False

    @property
    def reached(self) -> bool:
        return self.count >= self.number

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


def late_report(world: World) -> None:
    """A worker's report comes late."""
    world.report()


def worker_crash(world: World) -> None:
    if world.driver.workers_of(KEY):
        world.crash()


def unnoticed_crash(world: World) -> None:
    """The host of the worker is gone; RabbitMQ finds out later."""
    if world.driver.workers_of(KEY):
        world.crash(unnoticed=True)


def worker_cut_off(world: World) -> None:
    """The worker is alive, and connects again a second later."""
    world.cut_worker()


def leader_cut_off(world: World) -> None:
    world.cut()


def leader_killed(world: World) -> None:
    """Nothing is finished, nothing closed in order."""
    kill_within(world.leader)


def end_of_the_group(world: World) -> None:
    world.retire()


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


BEGIN = [request, worker_crash, worker_cut_off, leader_cut_off, end_of_the_group]
END = [request, late_report, worker_crash, unnoticed_crash, worker_cut_off, leader_cut_off]
SLOW_END = [request, late_report, leader_cut_off]
CASES = [
    *((first_request, event) for event in BEGIN),
    *((end, event) for event in END),
    *((slow_end, event) for event in SLOW_END),
    *((request_while_the_worker_is_stopped, event) for event in SLOW_END),
    *((history, leader_killed) for history in (first_request, end, failed_start, dead_letter)),
    *((end_with_a_request_at_work, event) for event in (request, unnoticed_crash, worker_cut_off, leader_cut_off)),
]


async def live_through(history: History, event: Callable[[World], None], number: int) -> bool:
    """Whether there was such a step. No task is left in the end."""
    before = asyncio.all_tasks()
    world, step = World(), Step(number)

    async def happen() -> None:
        event(world)
        await world.pass_on()

    await world.lead()
    world.once(step, happen)
    try:
        await history(world)
        await world.rest(REST)
        assert world.faults() == set(), f"{event.__name__} at step {number}"
    finally:
        await world.close()
    assert asyncio.all_tasks() - before == set(), f"{event.__name__} at step {number}"
    return step.reached


@pytest.mark.proves("controller/leader-killed")
@pytest.mark.parametrize(("history", "event"), CASES, ids=[f"{one.__name__}-{two.__name__}" for one, two in CASES])
async def test_no_request_is_lost_with_any_event_at_any_step(history: History, event: Callable[[World], None]) -> None:
    for number in itertools.count(1):
        if not await live_through(history, event, number):
            break
    assert number > 10

"""A leader killed at each of its steps in turn: no request is lost, no task is left, and the next leader goes on.

A history is run again and again, and each time the leader dies one step later: before a command takes effect at the
broker, or before its answer arrives. It ends when the leader lives through the whole story.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from osrdyne.config.models import LifecycleSettings
from osrdyne.drivers.base import Exit
from osrdyne.errors import BrokerError, StartFailedError
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, make_stack, settings_for

QUICK = settings_for(LifecycleSettings(unbind_delay=20.0, stop_delay=10.0, settle_delay=10.0))
REPLIES = "replies"


class World:
    """What survives leaders: broker, workers, and the requests whose publish was confirmed."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.driver = FakeDriver(self.clock, pool=POOL)
        self.broker.declare_queue(REPLIES, {})
        self.confirmed: set[str] = set()
        self.served: set[str] = set()
        self.steps = 0

    def leader(self) -> Stack:
        return make_stack(self.clock, broker=self.broker, driver=self.driver, settings=QUICK)

    async def ask(self, stack: Stack, key: str, name: str) -> None:
        await stack.publish(key, name.encode(), reply_to=REPLIES, correlation_id=name)
        self.confirmed.add(name)
        await self.clock.advance(1.0)

    async def serve(self, stack: Stack, key: str) -> None:
        """A worker takes what waits for it, and ends."""
        while stack.has_queue(key) and stack.broker.queues[stack.names.request_queue(Key(key))].ready:
            delivery = await stack.take(key)
            await delivery.ack()
            self.served.add(delivery.body.decode())
            await delivery.channel.close()

    def lost(self) -> set[str]:
        """Confirmed requests that are neither served nor answered nor anywhere (invariant 1)."""
        answered = {stored.message.correlation_id for stored in self.broker.queues[REPLIES].ready}
        kept = {body.decode() for name in self.broker.queues if name != REPLIES for body in self.broker.bodies(name)}
        return self.confirmed - self.served - answered - kept

    def kill_at(self, stack: Stack, number: int) -> None:
        """Kill this leader at the `number`-th step from now on."""

        async def hook(command: Command) -> None:
            self.steps += 1
            if self.steps == number:
                stack.killed = True
                stack.task.cancel()
                for connection in stack.connections:
                    connection.cut()

        self.broker.hook = hook


async def first_requests(world: World, stack: Stack) -> None:
    for number in range(3):
        await world.ask(stack, "a", f"a{number}")
    await world.ask(stack, "\udcff", "invalid")


async def idle_end(world: World, stack: Stack) -> None:
    """A group comes, is idle, and goes; a request comes in the middle of its end."""
    await world.ask(stack, "a", "first")
    await world.serve(stack, "a")
    await world.clock.advance(40.5)
    await world.ask(stack, "a", "second")
    await world.serve(stack, "a")
    await world.clock.advance(60.0)


async def crash_and_failure(world: World, stack: Stack) -> None:
    world.driver.fail_next_start(StartFailedError("no"))
    await world.ask(stack, "a", "to a group that fails")
    await world.ask(stack, "b", "to a group that crashes")
    for worker in world.driver.workers_of(Key("b")):
        await stack.report("b", Event.READY)
        world.driver.backend.end(worker, Exit(code=1))
    await world.clock.advance(5.0)


async def dead_letters(world: World, stack: Stack) -> None:
    for name in ("x", "y"):
        await world.ask(stack, "a", name)
    if stack.has_queue("a"):
        world.broker.expire("pool-req-a")
    await world.clock.advance(1.0)


STORIES = [first_requests, idle_end, crash_and_failure, dead_letters]
Story = Callable[[World, Stack], Awaitable[None]]


async def tell(story: Story, world: World, number: int, *, take_over: bool) -> None:
    """A history with a leader killed at the n-th step (of its take-over, or after it), then the next leader."""
    before = asyncio.all_tasks()
    first = world.leader()
    if take_over:
        world.kill_at(first, number)
    first.task = asyncio.create_task(first.lead())
    await world.clock.settle()
    if not take_over:
        world.kill_at(first, number)
    await story(world, first)
    if not first.task.done():
        await first.kill()
    world.broker.hook = None
    await world.clock.settle()
    assert asyncio.all_tasks() - before == set(), f"tasks were left behind by a leader killed at step {number}"
    async with leading(world.clock, broker=world.broker, driver=world.driver, settings=QUICK) as second:
        await world.clock.advance(5.0)
        assert second.orphans() == [], f"the next leader did not forward what one killed at step {number} had left"
        await world.clock.advance(120.0)


@pytest.mark.proves("controller/leader-killed")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_leader_killed_at_any_step_loses_nothing_and_leaves_no_task(story: Story) -> None:
    number = 0
    while True:
        number += 1
        world = World()
        await tell(story, world, number, take_over=False)
        assert world.lost() == set(), f"killed at step {number}"
        if world.steps < number:
            break
    assert number > 15


async def test_leader_killed_at_any_step_of_its_take_over_loses_nothing() -> None:
    async def nothing(world: World, stack: Stack) -> None:
        await world.clock.advance(1.0)

    number = 0
    while True:
        number += 1
        world = World()
        async with leading(world.clock, broker=world.broker, driver=world.driver, settings=QUICK) as earlier:
            await world.ask(earlier, "a", "waits for its worker")
        await world.ask(earlier, "b", "an orphan that was not read yet")
        await tell(nothing, world, number, take_over=True)
        assert world.lost() == set(), f"killed at step {number}"
        assert world.driver.count("start", Key("a")) == 1, f"a second worker after a leader killed at step {number}"
        if world.steps < number:
            break
    assert number > 50


async def test_terms_never_repeat_however_take_overs_end() -> None:
    """lifecycle: token-queue: and there is never no token."""
    terms: list[int] = []
    for number in range(1, 60):
        world = World()
        for _ in range(3):
            stack = world.leader()
            world.kill_at(stack, number)
            world.steps = 0
            stack.task = asyncio.create_task(stack.lead())
            await world.clock.advance(1.0)
            await stack.kill()
            terms += [stack.generation.term] if hasattr(stack, "term") else []
        world.broker.hook = None
        async with leading(world.clock, broker=world.broker, driver=world.driver) as last:
            terms.append(last.generation.term)
        assert terms == sorted(set(terms)), f"killed at step {number}"
        terms.clear()


async def test_error_at_any_command_of_the_broker_ends_the_term_and_leaves_no_task() -> None:
    """Any fault but a refusal of one key's: the term ends as a whole, at once, with errors of ours only."""
    number = 0
    while True:
        number += 1
        world = World()
        before = asyncio.all_tasks()
        stack = world.leader()
        stack.task = asyncio.create_task(stack.lead())
        await world.clock.settle()

        async def fail(_: Command, world: World = world, number: int = number) -> None:
            world.steps += 1
            if world.steps == number:
                raise BrokerError("the broker says no")

        world.broker.hook = fail
        with suppress(BrokerError):  # the client's own publish was hit
            await first_requests(world, stack)
        world.broker.hook = None
        await world.clock.settle()
        if not stack.task.done():
            await stack.kill()
        else:
            error = stack.task.exception()
            assert isinstance(error, BaseExceptionGroup)
            assert error.split(BrokerError)[1] is None, f"an error of another kind at step {number}"
        assert asyncio.all_tasks() - before == set()
        assert world.lost() == set()
        if world.steps < number:
            break

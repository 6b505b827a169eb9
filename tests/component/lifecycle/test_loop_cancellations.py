"""A leader killed at each step of its take-over, and one whose broker fails at each step of its work.

A history is run again and again, and each time the leader dies one step later: before a command takes effect at the
broker, or before its answer arrives. `test_interleavings` kills it at each step of its work.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

from broker_steps import kill_within

from osrdyne.config.models import LifecycleSettings
from osrdyne.errors import BrokerError
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
        self.steps = 0

    def leader(self) -> Stack:
        return make_stack(self.clock, broker=self.broker, driver=self.driver, settings=QUICK)

    async def ask(self, stack: Stack, key: str, name: str) -> None:
        await stack.publish(key, name.encode(), reply_to=REPLIES, correlation_id=name)
        self.confirmed.add(name)
        await self.clock.advance(1.0)

    def lost(self) -> set[str]:
        """Confirmed requests that are neither answered nor anywhere (invariant 1)."""
        answered = {stored.message.correlation_id for stored in self.broker.queues[REPLIES].ready}
        kept = {body.decode() for name in self.broker.queues if name != REPLIES for body in self.broker.bodies(name)}
        return self.confirmed - answered - kept

    def kill_at(self, stack: Stack, number: int) -> None:
        """Kill this leader at the `number`-th step from now on."""

        async def hook(command: Command) -> None:
            self.steps += 1
            if self.steps == number:
                kill_within(stack)

        self.broker.hook = hook


async def first_requests(world: World, stack: Stack) -> None:
    for number in range(3):
        await world.ask(stack, "a", f"a{number}")
    await world.ask(stack, "\udcff", "invalid")


async def test_leader_killed_at_any_step_of_its_take_over_loses_nothing() -> None:
    for number in itertools.count(1):
        world = World()
        async with leading(world.clock, broker=world.broker, driver=world.driver, settings=QUICK) as earlier:
            await world.ask(earlier, "a", "waits for its worker")
        await world.ask(earlier, "b", "an orphan that was not read yet")
        before = asyncio.all_tasks()
        killed = world.leader()
        world.kill_at(killed, number)
        killed.task = asyncio.create_task(killed.lead())
        await world.clock.advance(1.0)
        if not killed.task.done():
            await killed.kill()
        world.broker.hook = None
        await world.clock.settle()
        assert asyncio.all_tasks() - before == set(), f"tasks were left behind by a leader killed at step {number}"
        async with leading(world.clock, broker=world.broker, driver=world.driver, settings=QUICK) as following:
            await world.clock.advance(5.0)
            assert following.orphans() == [], f"the next leader did not forward what one killed at {number} had left"
            await world.clock.advance(120.0)
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

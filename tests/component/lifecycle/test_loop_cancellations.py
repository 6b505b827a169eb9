"""A leader killed at each step of its take-over, and one whose broker fails at each step of its work.

A history is run again and again, and each time the leader dies one step later: before a command takes effect at the
broker, or before its answer arrives. `test_interleavings` kills it at each step of its work.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

from broker_steps import kill_within
from lifecycle_world import REPLIES, PoolWorld

from osrdyne.config.models import LifecycleSettings
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.broker import Command
from osrdyne.testing.fakes.stack import Stack, leading, make_stack, settings_for

QUICK = settings_for(LifecycleSettings(unbind_delay=20.0, stop_delay=10.0, settle_delay=10.0))


class World(PoolWorld):
    """With the requests whose publish was confirmed."""

    def __init__(self) -> None:
        super().__init__()
        self.confirmed: set[str] = set()
        self.steps = 0

    def leader(self) -> Stack:
        """One that has begun to lead."""
        stack = make_stack(self.clock, broker=self.broker, driver=self.driver, settings=QUICK)
        stack.task = asyncio.create_task(stack.lead())
        return stack

    async def ask(self, stack: Stack, key: str, name: str) -> None:
        await stack.publish(key, name.encode(), reply_to=REPLIES, correlation_id=name)
        self.confirmed.add(name)
        await self.clock.advance(1.0)

    def lost(self) -> set[str]:
        """Confirmed requests that are neither answered nor anywhere (invariant 1)."""
        answered = {stored.message.correlation_id for stored in self.broker.queues[REPLIES].ready}
        kept = {body.decode() for name in self.broker.queues if name != REPLIES for body in self.broker.bodies(name)}
        return self.confirmed - answered - kept

    def at(self, number: int, act: Callable[[], object]) -> None:
        """Do this at the `number`-th step from now on."""
        self.steps = 0

        async def hook(_: Command) -> None:
            self.steps += 1
            if self.steps == number:
                act()

        self.broker.hook = hook

    def following(self) -> AbstractAsyncContextManager[Stack]:
        self.broker.hook = None
        return leading(self.clock, broker=self.broker, driver=self.driver, settings=QUICK)


async def test_leader_killed_at_any_step_of_its_take_over_loses_nothing():
    for number in itertools.count(1):
        world = World()
        async with world.following() as earlier:
            await world.ask(earlier, "a", "waits for its worker")
        await world.ask(earlier, "b", "an orphan that was not read yet")
        before = asyncio.all_tasks()
        killed = world.leader()
        world.at(number, partial(kill_within, killed))
        await world.clock.advance(1.0)
        if not killed.task.done():
            await killed.kill()
        world.broker.hook = None
        await world.clock.settle()
        assert asyncio.all_tasks() - before == set(), f"tasks were left behind by a leader killed at step {number}"
        async with world.following() as following:
            await world.clock.advance(5.0)
            assert following.orphans() == [], f"the next leader did not forward what one killed at {number} had left"
            await world.clock.advance(120.0)
        assert world.lost() == set(), f"killed at step {number}"
        assert world.driver.count("start", Key("a")) == 1, f"a second worker after a leader killed at step {number}"
        if world.steps < number:
            break
    assert number > 50


async def test_terms_never_repeat_however_take_overs_end():
    """lifecycle: token-queue: and there is never no token."""
    for number in range(1, 60):
        world, terms = World(), list[int]()
        for _ in range(3):
            stack = world.leader()
            world.at(number, partial(kill_within, stack))
            await world.clock.advance(1.0)
            await stack.kill()
            terms += [stack.generation.term] if hasattr(stack, "term") else []
        async with world.following() as last:
            terms.append(last.generation.term)
        assert terms == sorted(set(terms)), f"killed at step {number}"


async def test_error_at_any_command_of_the_broker_ends_the_term_and_leaves_no_task():
    """Any fault but a refusal of one key's: the term ends as a whole, at once, with errors of ours only."""

    def fail():
        raise BrokerError("the broker says no")

    for number in itertools.count(1):
        world = World()
        before = asyncio.all_tasks()
        stack = world.leader()
        await world.clock.settle()
        world.at(number, fail)
        with suppress(BrokerError):  # the client's own publish was hit
            for name in ("a0", "a1", "a2"):
                await world.ask(stack, "a", name)
            await world.ask(stack, "\udcff", "invalid")
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

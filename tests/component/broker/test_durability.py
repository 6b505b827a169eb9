"""New quorum queues are persisted by RabbitMQ before anything is confirmed in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from broker_steps import hold, refuse

from osrdyne.broker.queues.durability import DELETE_AFTER, TIDY_AFTER, QueueDurability
from osrdyne.errors import BrokerConflictError, BrokerSilentError
from osrdyne.protocol.names import Key, PoolNames, QueueName
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.stack import leading

A, B = Key("a"), Key("b")
ONE, TWO = (["declare p-register-1"], ["delete p-register-1", "declare p-register-2"])
ONE_AGAIN = ["delete p-register-2", "declare p-register-1"]
FIRST = ["delete p-register-1", "delete p-register-2", *ONE, *TWO]
FIRST_OF_A_SINGLE_KEY = ["delete p-register-3", "delete p-register-4", "declare p-register-3", "delete p-register-3"]
OF_A_NEW_KEY = [("declare", "pool-req-a"), ("declare", "pool-register-4"), ("bind", "pool-req-a")]


class Scratch:
    """Channels that note what is asked of them. A declaration lasts until `go_on` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    is_closed = False
    refuses = False

    async def take(self) -> Scratch:
        return self

    async def declare_queue(self, name: str, **_: object) -> None:
        self.asked.append(f"declare {name}")
        await self.go_on.wait()
        if self.refuses:
            raise BrokerConflictError("PRECONDITION_FAILED")

    async def begin_declare_queue(self, name: str, **_: object) -> None:
        self.asked.append(f"declare {name}")

    async def delete_queue(self, name: str) -> int:
        await asyncio.sleep(0)
        self.asked.append(f"delete {name}")
        return 0

    async def begin_delete_queue(self, name: str) -> None:
        await self.delete_queue(name)

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def scratch():
    return Scratch()


def register_over(scratch: Any, clock: VirtualClock | None = None) -> QueueDurability:
    return QueueDurability(PoolNames("p"), scratch, term=lambda: 1, clock=clock or VirtualClock())


@asynccontextmanager
async def running(scratch: Any, clock: VirtualClock) -> AsyncIterator[QueueDurability]:
    """One that has had its first turn, and goes on."""
    register = register_over(scratch, clock)
    task = asyncio.create_task(register.run())
    await clock.settle()
    yield register
    task.cancel()


@pytest.mark.proves("broker/rabbitmq-killed-right-queue")
async def test_durability_queue_makes_the_broker_persist_other_queues(scratch):
    """A name that RabbitMQ remembers from a moment ago would not; an earlier leader or a broken channel may have left
    either of them."""
    register = register_over(scratch)
    for _ in range(3):
        await register.persist()
    scratch.is_closed = True
    await register.persist()
    assert scratch.asked == [*FIRST, *ONE_AGAIN, *TWO, *FIRST]


async def test_queue_that_came_goes_a_moment_later(scratch, clock):
    """Not at once: the binding that has waited for it would wait for the deletion as well."""
    async with running(scratch, clock) as register:
        scratch.asked.clear()
        await register.persist()
        await clock.settle()
        assert scratch.asked == ["declare p-register-2"]
        await clock.advance(DELETE_AFTER)
        assert scratch.asked == ["declare p-register-2", "delete p-register-2"]


async def test_single_key_is_declared_and_persisted_over_one_channel(scratch, clock):
    async with running(scratch, clock) as register:
        assert scratch.asked == [*FIRST[:4], *FIRST_OF_A_SINGLE_KEY]
        scratch.asked.clear()
        await register.declare(A, QueueName("p-req-a"), {})
        for _ in range(2):  # it is persisted once
            await register.wait_persisted(A)
        assert scratch.asked == ["declare p-req-a", "declare p-register-4"]
        scratch.refuses = True
        with pytest.raises(BrokerConflictError):
            await register.declare(B, QueueName("p-req-b"), {})
        scratch.refuses = scratch.is_closed = False
        assert not register.is_idle
        await clock.advance(DELETE_AFTER)
        assert register.is_idle


@pytest.fixture
async def begun(scratch):
    """One that has had its first turn."""
    register = register_over(scratch)
    await register.persist()
    scratch.asked.clear()
    return register


async def test_queues_declared_meanwhile_share_the_next_declaration(scratch, begun):
    await asyncio.gather(*(begun.wait_persisted(Key(f"{number}")) for number in range(10)))
    await begun.wait_persisted(Key("1"))
    assert scratch.asked == ONE_AGAIN


async def test_queue_declared_during_a_declaration_needs_the_next_one(scratch, begun):
    scratch.go_on.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(begun.persist())
        while not scratch.asked:
            await asyncio.sleep(0)
        begun.note(A)
        group.create_task(begun.wait_persisted(A))
        scratch.go_on.set()
    assert scratch.asked == [*ONE_AGAIN, *TWO]


@pytest.mark.parametrize("failures", [0, 1])
async def test_new_queue_is_bound_once_it_is_persisted(clock, broker, failures):
    """A refused turn is repeated, together with the declaration before it."""
    refuse(broker, BrokerConflictError("LOCKED"), ("declare", "pool-register-4", False), times=failures)
    async with leading(clock, broker=broker) as stack:
        stack.require(A)
        await clock.advance(10.0)
    done = [target for name, target, _ in broker.commands if (name, target) in OF_A_NEW_KEY]
    assert done == [*["pool-req-a"] * failures, "pool-req-a", "pool-register-4", "pool-req-a"]


async def test_worker_of_a_new_key_starts_while_its_queue_is_persisted(clock, broker):
    hold(broker, ("declare", "pool-register-1", False))
    async with leading(clock, broker=broker) as stack:
        stack.require(A)
        await clock.advance(1.0)
        assert (stack.running("a"), stack.is_bound("a")) == (1, False)


async def test_deletion_of_a_queue_is_persisted(clock):
    async with leading(clock) as stack:
        stack.require(A)
        while stack.broker.count("delete", "pool-req-a") == 0:
            await clock.advance(60.0)
        await clock.settle()
    commands = [(name, target) for name, target, done in stack.broker.commands if done]
    assert ("declare", "pool-register-2") in commands[commands.index(("delete", "pool-req-a")) :]


@pytest.mark.proves("broker/rabbitmq-3-10-still")
async def test_next_leader_persists_before_it_binds_and_tidies_up_later(clock, broker):
    """Not at once: RabbitMQ may still declare it for the killed leader, and would end the connection of this one."""
    async with leading(clock, broker=broker) as stack:
        stack.require(A)
        while "pool-register-4" not in broker.queues:
            await clock.advance(0.01)
        await stack.kill()
    broker.commands.clear()
    async with leading(clock, broker=broker):
        await clock.advance(TIDY_AFTER - 5.0)
        assert "pool-register-4" in broker.queues
        await clock.advance(10.0)
    assert "pool-register-4" not in broker.queues
    of_this_term = [("declare", "pool-register-6"), ("bind", "pool-req-a")]
    done = [(name, target) for name, target, _ in broker.commands if (name, target) in of_this_term]
    assert done == of_this_term


async def test_failed_deletion_of_what_a_leader_left_costs_no_term(clock, broker):
    async with leading(clock, broker=broker) as stack:
        refuse(broker, BrokerSilentError("no answer in time"), ("delete", "pool-register-5", False))
        await clock.advance(TIDY_AFTER + 10.0)
        assert broker.count("delete", "pool-register-5") == 0
        assert not stack.task.done()

"""New quorum queues are written down by RabbitMQ before anything is confirmed in them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from osrdyne.broker.queue_register import QueueRegister
from osrdyne.errors import BrokerConflictError
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.broker import Command, FakeBroker
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.stack import leading

ONCE = ["declare p-register", "delete p-register"]
FIRST = ["delete p-register", *ONCE]
OF_A_NEW_KEY = [("declare", "pool-req-a"), ("declare", "pool-register"), ("bind", "pool-req-a")]


class Scratch:
    """Channels that note what is asked of them, and take a turn of the loop for it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    is_closed = False

    async def take(self) -> Scratch:
        return self

    async def declare_queue(self, name: str, **_: object) -> None:
        await asyncio.sleep(0)
        self.asked.append(f"declare {name}")

    async def delete_queue(self, name: str) -> int:
        await asyncio.sleep(0)
        self.asked.append(f"delete {name}")
        return 0

    async def begin_delete_queue(self, name: str) -> None:
        await self.delete_queue(name)

    async def close(self) -> None:
        self.is_closed = True


def register_over(scratch: Any) -> QueueRegister:
    return QueueRegister(PoolNames("p"), scratch)


async def test_queue_that_comes_and_goes_makes_the_broker_write() -> None:
    scratch = Scratch()
    await register_over(scratch).write()
    assert scratch.asked == FIRST


async def test_what_a_broken_channel_may_have_left_is_deleted_first() -> None:
    scratch = Scratch()
    register = register_over(scratch)
    await register.write()
    scratch.is_closed = True
    await register.write()
    assert scratch.asked == [*FIRST, *FIRST]


async def test_queues_declared_while_it_runs_share_the_next_turn() -> None:
    scratch = Scratch()
    register = register_over(scratch)
    await asyncio.gather(*(register.write() for _ in range(10)))
    assert scratch.asked == [*FIRST, *ONCE]


@pytest.mark.parametrize("failures", [0, 1])
async def test_new_queue_is_bound_only_when_it_is_written_down(failures: int) -> None:
    """At the second try it is not new any more."""
    clock = VirtualClock()
    broker = FakeBroker(clock)
    left = [BrokerConflictError("RESOURCE_LOCKED")] * failures

    async def refuse(command: Command) -> None:
        if command == ("declare", "pool-register", False) and left:
            raise left.pop()

    broker.hook = refuse
    async with leading(clock, broker=broker) as stack:
        stack.term.tracker.require_worker_group(Key("a"))
        await clock.advance(10.0)
    done = [target for name, target, _ in broker.commands if (name, target) in OF_A_NEW_KEY]
    assert done == ["pool-req-a", "pool-register", "pool-req-a"]

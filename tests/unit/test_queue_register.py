"""New quorum queues are written down by RabbitMQ before anything is confirmed in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from osrdyne.broker.queue_register import QueueRegister
from osrdyne.protocol.names import PoolNames

ONCE = ["delete p-register", "declare p-register", "delete p-register"]


class Scratch:
    """Channels that note what is asked of them, and take a turn of the loop for it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Scratch]:
        yield self

    async def declare_queue(self, name: str, **_: object) -> None:
        await asyncio.sleep(0)
        self.asked.append(f"declare {name}")

    async def delete_queue(self, name: str) -> int:
        await asyncio.sleep(0)
        self.asked.append(f"delete {name}")
        return 0


def register_over(scratch: Any) -> QueueRegister:
    return QueueRegister(PoolNames("p"), scratch)


async def test_queue_that_comes_and_goes_makes_the_broker_write() -> None:
    scratch = Scratch()
    await register_over(scratch).write()
    assert scratch.asked == ONCE


async def test_queues_declared_while_it_runs_share_the_next_turn() -> None:
    scratch = Scratch()
    register = register_over(scratch)
    await asyncio.gather(*(register.write() for _ in range(10)))
    assert scratch.asked == [*ONCE, *ONCE]

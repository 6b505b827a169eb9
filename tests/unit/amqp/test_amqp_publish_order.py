"""The publish order of one channel: by message id, and by destination."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from osrdyne.amqp.publish_order import PublishOrder

A, B = ("exchange", "a"), ("exchange", "b")


class Publishes:
    """Messages that are published until they are confirmed; `begun` holds their order."""

    def __init__(self) -> None:
        self.order = PublishOrder()
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._confirms: dict[str, asyncio.Event] = {}

    async def start(self, *messages: tuple[str, str | None, tuple[str, str]]) -> None:
        """Each has a name, a message id and a destination."""
        for name, message_id, destination in messages:
            self._confirms[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._publish(name, message_id, destination))
            await settled()

    async def confirm(self, *names: str) -> None:
        for name in names:
            self._confirms[name].set()
            await settled()

    async def _publish(self, name: str, message_id: str | None, destination: tuple[str, str]) -> None:
        async with AsyncExitStack() as stack:
            if not self.order.is_free(message_id, destination):
                await stack.enter_async_context(self.order.ticket(message_id, destination))
            self.begun.append(name)
            await self._confirms[name].wait()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_message_of_an_id_in_flight_waits_and_holds_back_its_destination() -> None:
    publishes = Publishes()
    await publishes.start(("1", "x", A), ("2", "x", A), ("3", "y", A), ("4", None, A))
    assert publishes.begun == ["1"]
    await publishes.confirm("1")
    assert publishes.begun == ["1", "2", "3", "4"]
    await publishes.confirm("2", "3", "4")
    assert publishes.order.is_free(None, A)


async def test_other_destinations_do_not_wait_for_a_repeated_id() -> None:
    publishes = Publishes()
    await publishes.start(("1", "x", A), ("2", "x", A), ("3", "y", B), ("4", None, B), ("5", "x", B))
    assert publishes.begun == ["1", "3", "4"]
    await publishes.confirm("1", "2", "3", "4", "5")
    assert publishes.begun == ["1", "3", "4", "2", "5"]


async def test_cancelled_waiter_delays_no_other() -> None:
    publishes = Publishes()
    await publishes.start(("1", "x", A), ("2", "x", A), ("3", None, A))
    publishes.tasks["2"].cancel()
    await settled()
    assert publishes.begun == ["1", "3"]
    await publishes.confirm("1", "3")

"""Publishes on one channel: their order by message id and destination, and the time-out of a confirm."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from osrdyne.amqp.confirm_timeout import ConfirmTimeout
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


async def test_message_of_an_id_in_flight_waits_and_holds_back_its_destination_alone_unless_it_is_cancelled():
    publishes = Publishes()
    await publishes.start(("1", "x", A), ("2", "x", A), ("3", "y", A), ("4", None, A))
    await publishes.start(("5", "z", B), ("6", None, B), ("7", "x", B))
    assert publishes.begun == ["1", "5", "6"]
    await publishes.confirm("1")
    assert publishes.begun == ["1", "5", "6", "2", "3", "4"]
    await publishes.confirm("2", "3", "4", "5", "6")
    assert publishes.begun[-1] == "7"
    await publishes.start(("8", "x", A), ("9", None, A))
    publishes.tasks["8"].cancel()
    await settled()
    assert publishes.begun[-2:] == ["7", "9"]
    await publishes.confirm("7", "9")
    assert publishes.order.is_free(None, A)


SHORT, NEVER = 0.02, 3600.0


async def test_time_stands_still_while_blocked():
    answer = asyncio.get_running_loop().create_future()
    looks = iter(range(1_000))

    def is_blocked():
        if next(looks) == 30:  # three times the limit
            answer.set_result("confirmed")
        return True

    with ConfirmTimeout(SHORT, is_blocked):
        assert await answer == "confirmed"


async def test_silence_raises_a_timeout_and_time_starts_again_after_a_block():
    looks = 0

    def is_blocked():
        nonlocal looks
        looks += 1
        return looks == 9

    with pytest.raises(TimeoutError), ConfirmTimeout(SHORT, is_blocked):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert (looks, task.cancelling()) == (19, 0)


async def test_cancellation_from_outside_stays_one():
    async def wait():
        with ConfirmTimeout(NEVER, lambda: False):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancellation_at_the_same_time_wins():
    task = asyncio.current_task()
    assert task is not None
    looks = iter(range(10))

    def is_blocked():
        if next(looks) == 9:  # the last look of the time-out
            task.cancel()
        return False

    with pytest.raises(asyncio.CancelledError), ConfirmTimeout(SHORT, is_blocked):
        await asyncio.Event().wait()
    task.uncancel()

"""The time-out of a confirm."""

import asyncio

import pytest

from osrdyne.amqp.confirm_timeout import ConfirmTimeout

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

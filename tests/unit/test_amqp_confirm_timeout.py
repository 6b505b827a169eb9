"""The limit for one confirm."""

from __future__ import annotations

import asyncio

import pytest

from osrdyne.amqp.confirm_timeout import SilenceLimit

SHORT, NEVER = 0.02, 3600.0


async def test_silence_ends_the_wait() -> None:
    with pytest.raises(TimeoutError), SilenceLimit(SHORT, lambda: False):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_time_stands_still_while_blocked() -> None:
    answer = asyncio.get_running_loop().create_future()
    looks = iter(range(1_000))

    def is_blocked() -> bool:
        if next(looks) == 30:  # three times the limit
            answer.set_result("confirmed")
        return True

    with SilenceLimit(SHORT, is_blocked):
        assert await answer == "confirmed"


async def test_limit_begins_anew_after_a_block() -> None:
    looks = 0

    def is_blocked() -> bool:
        nonlocal looks
        looks += 1
        return looks == 9

    with pytest.raises(TimeoutError), SilenceLimit(SHORT, is_blocked):
        await asyncio.Event().wait()
    assert looks == 19


async def test_cancellation_from_outside_stays_one() -> None:
    async def wait() -> None:
        with SilenceLimit(NEVER, lambda: False):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_error_inside_passes_through() -> None:
    with pytest.raises(KeyError), SilenceLimit(NEVER, lambda: False):
        raise KeyError


async def test_cancellation_at_the_same_time_wins_over_the_limit() -> None:
    task = asyncio.current_task()
    assert task is not None

    def is_blocked() -> bool:
        task.cancel()
        return False

    limit = SilenceLimit(SHORT, is_blocked)
    limit._steps_of_silence = 9
    with pytest.raises(asyncio.CancelledError), limit:
        await asyncio.Event().wait()
    task.uncancel()

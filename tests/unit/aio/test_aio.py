"""The asyncio kit: wake-up, watch cell, back-off, supervision; each cancelled once at every await."""

import asyncio
import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.aio.clock import Backoff
from osrdyne.aio.signals import ChangeFeed, Wakeup, WatchCell
from osrdyne.aio.tasks import SMALL, KeyedJobs, TaskEndedError, first_of, off_loop, start_endless
from osrdyne.testing.clock import VirtualClock


class TestWakeup:
    @pytest.mark.parametrize("timeout", [60, None])
    async def test_set_during_wait_ends_it_and_leaves_no_task_and_no_sleeper(self, timeout):
        clock = VirtualClock(monotonic=0)
        wakeup = Wakeup(clock)
        waiting = asyncio.create_task(wakeup.wait(timeout=timeout))
        await clock.advance(59)
        assert not waiting.done()
        wakeup.set()
        await clock.settle()
        assert (waiting.result(), clock.monotonic()) == (True, 59)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert clock.pending == []
        for none in (0, -1):
            for _ in range(3):
                wakeup.set()
            assert [await wakeup.wait(timeout=none) for _ in range(2)] == [True, False], "many sets are one"

    @pytest.mark.parametrize("timeout", [None, 60, 0])
    async def test_cancelled_wait_keeps_a_set_that_came(self, clock, timeout):
        wakeup = Wakeup(clock)
        waiting = asyncio.create_task(wakeup.wait(timeout=timeout))
        await asyncio.sleep(0)
        wakeup.set()
        waiting.cancel()
        await clock.settle()
        assert waiting.cancelled()
        assert await wakeup.wait(timeout=0) is True
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert clock.pending == []


class TestWatchCell:
    async def test_every_reader_but_a_cancelled_one_gets_the_last_value_that_differs(self, clock):
        cell = WatchCell(0)
        gone, *staying = [asyncio.create_task(cell.changed()) for _ in range(3)]
        await asyncio.sleep(0)
        gone.cancel()
        cell.set(0)
        await clock.settle()
        assert not any(reader.done() for reader in staying)
        cell.set(1)
        cell.set(2)
        assert await asyncio.gather(*staying) == [2, 2]
        assert (cell.value, gone.cancelled()) == (2, True)


class TestBackoff:
    @given(failures=st.integers(min_value=-5, max_value=10**9), spread=st.floats(0, 1))
    def test_delay_stays_within_its_limits_whatever_the_count(self, failures, spread):
        backoff = Backoff(initial=0.5, maximum=30, jitter=0.1)
        assert 0.45 <= backoff.delay(failures, spread=lambda: spread) <= 33


class TestEndlessTasks:
    @pytest.mark.parametrize(("fails", "kind"), [(False, TaskEndedError), (True, ValueError)], ids=["returns", "fails"])
    async def test_task_that_ends_brings_the_group_down(self, fails, kind):
        async def end():
            await asyncio.sleep(0)
            if fails:
                raise ValueError("orphan processor")

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                start_endless(group, "orphan processor", end())
        assert caught.group_contains(kind, match="orphan processor")


class TestChangeFeed:
    async def test_every_subscriber_gets_each_change_once_also_after_a_cancelled_wait(self):
        feed: ChangeFeed[str] = ChangeFeed()
        slow, quick = feed.subscribe(already=["known"]), feed.subscribe()
        waiting = asyncio.create_task(quick.wait())
        await asyncio.sleep(0)
        for key in ("b", "a", "b"):
            feed.notify(key)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert quick.take() == ["b", "a"]
        feed.notify("c")
        assert (await slow.wait(), quick.take()) == (["known", "b", "a", "c"], ["c"])


class TestKeyedJobs:
    async def test_items_of_a_key_go_in_order_and_keys_side_by_side(self):
        done: list[str] = []
        gate = asyncio.Event()

        async def work(item):
            if item == "a1":
                await gate.wait()
            done.append(item)

        async with asyncio.TaskGroup() as group:
            jobs: KeyedJobs[str, str] = KeyedJobs(group, "jobs of", work)
            for item in ("a1", "a2", "b1"):
                jobs.submit(item[0], item)
            await asyncio.sleep(0)
            assert done == ["b1"]
            gate.set()
        assert (done, jobs.is_busy("a")) == (["b1", "a1", "a2"], False)


async def test_work_off_the_loop_pauses_the_collector_until_the_last_of_it_ends():
    states: list[bool] = []
    first_runs, first_may_end = threading.Event(), threading.Event()

    def first():
        first_runs.set()
        first_may_end.wait(60)
        states.append(gc.isenabled())

    def fails():
        states.append(gc.isenabled())
        raise ValueError

    waiting = asyncio.create_task(off_loop(SMALL + 1, first))
    await asyncio.to_thread(first_runs.wait, 60)
    with pytest.raises(ValueError):
        await off_loop(SMALL + 1, fails)
    assert not gc.isenabled()
    first_may_end.set()
    await waiting
    assert (states, gc.isenabled()) == ([False, False], True)
    threads = [await off_loop(size, threading.get_ident) for size in (SMALL, SMALL + 1)]
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_first_of_raises_the_exception_of_the_first_and_cancels_the_others():
    cancelled = asyncio.Event()

    async def fail():
        raise ValueError("broken")

    async def wait_until_cancelled():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    with pytest.raises(ValueError, match="broken"):
        await first_of(fail(), wait_until_cancelled())
    await asyncio.wait_for(cancelled.wait(), 60)

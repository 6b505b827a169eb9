"""Histories of requests and faults, drawn by hypothesis, that real leaders live through on a broker in memory.

After each step, and when everything has come to rest, nothing may be wrong: see `HistoryWorld.faults` and `leftovers`.
A failure is shown as the shortest history that has it. `OSRDYNE_HISTORIES` says how many there are (`make histories`).
"""

import gc
import logging
import os
from collections.abc import Sequence
from contextlib import closing

import pytest
import structlog
from history_steps import BY_NAME, STEPS, STEPS_OF_POOLED, Step
from history_world import HistoryWorld, Pool
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lifecycle_world import Fault
from test_unsafe_variants import VARIANTS, Patch, left_out, replace_decisions

from osrdyne.testing.fakes.loop import MemoryLoop

COUNT = int(os.environ.get("OSRDYNE_HISTORIES", "400"))
ALWAYS_THE_SAME = "OSRDYNE_HISTORIES" not in os.environ
"""`make test` lives through the same histories each time; a given number makes others."""
HISTORIES = st.lists(st.sampled_from(STEPS), min_size=5, max_size=20)
HISTORIES_OF_POOLED = st.lists(st.sampled_from(STEPS_OF_POOLED), min_size=5, max_size=20)
PORTION = 500
"""Histories of one test: with many tests, two processes end at about the same time."""
GC_THRESHOLD = 5_000
"""What a world leaves behind is collected less often than usual, and while the processor still has it at hand."""
SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow])


def portions(count: int) -> list[int]:
    return [min(PORTION, count - done) for done in range(0, count, PORTION)]


@pytest.fixture(scope="module")
def loop():
    """One event loop for all histories, and no logs: a million warnings would help no reader."""
    logs, threshold = structlog.get_config(), gc.get_threshold()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    with closing(MemoryLoop()) as loop:
        yield loop
    gc.set_threshold(*threshold)
    gc.unfreeze()
    structlog.configure(**logs)


def live_through(
    loop: MemoryLoop, history: Sequence[Step], pool: Pool = Pool.ROOMY, *, patches: Sequence[Patch] = ()
) -> dict[str, object]:
    """What is wrong at the first moment when anything is, or in the end."""
    faults = loop.run_until_complete(_live_through(history, pool, patches=patches))
    assert loop.unfinished() == [], "tasks were left behind"
    return faults


async def _live_through(history: Sequence[Step], pool: Pool, *, patches: Sequence[Patch]) -> dict[str, object]:
    world = HistoryWorld(pool)
    with pytest.MonkeyPatch.context() as patch:
        replace_decisions(world, patches, patch)
        await world.lead()
        try:
            for step in history:
                await step.take(world)
                world.see_to_leader()
                if faults := world.faults():
                    return faults
            return await world.rest()
        finally:
            await world.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", portions(COUNT // len(Pool)))
@pytest.mark.parametrize("pool", Pool)
def test_history_of_faults_loses_nothing_and_leaves_nothing(loop, pool, count):
    @settings(SETTINGS, max_examples=count, derandomize=ALWAYS_THE_SAME)
    @given(HISTORIES_OF_POOLED if pool is Pool.POOLED else HISTORIES)
    def check(history: list[Step]) -> None:
        assert live_through(loop, history, pool) == {}

    check()


@pytest.mark.parametrize("manner", ["frozen", "idle"])
def test_worker_that_hangs_leaves_its_request_open_without_the_watch(loop, manner):
    history = [BY_NAME[f"next worker is {manner}"], BY_NAME["send plain a"]]
    patches = [left_out("osrdyne.pool.workers.liveness.WorkerLiveness.check")]
    assert Fault.NO_OUTCOME in live_through(loop, history, Pool.NARROW, patches=patches)
    assert live_through(loop, history, Pool.NARROW) == {}


@pytest.mark.parametrize("name", ["delbound", "edge", "fwd"])
def test_search_finds_what_a_broken_decision_does(loop, name):
    [breaks] = [variant.breaks for variant in VARIANTS if variant.name == name]

    @settings(SETTINGS, max_examples=400, phases=[Phase.generate], database=None, derandomize=True)
    @given(HISTORIES)
    def check(history: list[Step]) -> None:
        assert live_through(loop, history, patches=breaks) == {}

    with pytest.raises(AssertionError):
        check()

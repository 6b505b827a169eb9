"""Histories of requests and faults, drawn by hypothesis, that real leaders live through on a broker in memory.

After each step, and when everything has come to rest, nothing may be wrong: see `HistoryWorld.faults` and `leftovers`.
A failure is shown as the shortest history that has it. `OSRDYNE_HISTORIES` says how many there are (`make histories`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import selectors
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import structlog
from history_steps import BY_NAME, STEPS, Step
from history_world import HistoryWorld
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lifecycle_world import Fault
from test_unsafe_variants import VARIANTS, Patch, left_out

COUNT = int(os.environ.get("OSRDYNE_HISTORIES", "400"))
ALWAYS_THE_SAME = "OSRDYNE_HISTORIES" not in os.environ
"""`make test` lives through the same histories each time; whoever asks for a number gets others."""
HISTORIES = st.lists(st.sampled_from(STEPS), min_size=5, max_size=20)
GC_THRESHOLD = 20_000
"""The worlds that are over are collected in larger portions than usual; it saves an eighth of the time."""
SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow])


class NothingToRead(selectors.DefaultSelector):
    """Asks the system only when there is nothing else to do: no history reads or writes anything."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return [] if timeout == 0 else super().select(timeout)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all histories, and no logs: nobody reads a million warnings."""
    logs, threshold = structlog.get_config(), gc.get_threshold()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.set_threshold(GC_THRESHOLD)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(NothingToRead())) as runner:
        yield runner
    gc.set_threshold(*threshold)
    structlog.configure(**logs)


async def live_through(history: Sequence[Step], *, narrow: bool, patches: Sequence[Patch] = ()) -> dict[str, object]:
    """What is wrong at the first moment when anything is, or in the end."""
    world = HistoryWorld(narrow=narrow)
    with pytest.MonkeyPatch.context() as patch:
        for target, make in patches:
            patch.setattr(target, make(world))
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
            assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks were left behind"


@pytest.mark.timeout(max(600, COUNT))
@pytest.mark.parametrize("narrow", [False, True], ids=["roomy", "narrow"])
def test_history_of_faults_loses_nothing_and_leaves_nothing(runner: asyncio.Runner, narrow: bool) -> None:
    @settings(SETTINGS, max_examples=COUNT // 2, derandomize=ALWAYS_THE_SAME)
    @given(HISTORIES)
    def check(history: list[Step]) -> None:
        assert runner.run(live_through(history, narrow=narrow)) == {}

    check()


@dataclass(frozen=True, slots=True)
class Found:
    """The shortest history that goes wrong with one decision replaced, as in `test_unsafe_variants`."""

    variant: str
    history: tuple[str, ...]
    also: bool = False
    """Whether the other net has to be taken away as well."""

    def steps(self) -> list[Step]:
        return [BY_NAME[name] for name in self.history]


HELD_BY_THE_DEAD = (
    "send long a",
    "5 s pass",
    "deaths go unnoticed",
    "worker a dies",
    "0.3 s pass",
    "retire a",
    "45 s pass",
    "45 s pass",
)
FOUND = [
    Found("ackfirst", ("forward is dropped, not confirmed", "send plain b", "25 s pass")),
    Found("nopin", ("commands stand still", "send plain b", "0.3 s pass", "retire b")),
    Found("stopblind", ("next worker is silent", "send long c")),
    Found("startfail_keep", ("send long c", "broker restarts", "start fails for good")),
    Found("nosettle", ("send plain a", "5 s pass", "transit takes 5.0 s", "send plain a", "2 turns", "retire a")),
    Found(
        "bindrace",
        ("next worker is stubborn", "send plain a", "5 s pass", "retire a", "25 s pass", "send long a", "45 s pass"),
    ),
    Found("ev1_ready", HELD_BY_THE_DEAD, also=True),
    Found("ev6_drain", HELD_BY_THE_DEAD, also=True),
    Found("misslist", ("send deadly c", "1 s pass", "kill at command 3", "one more daemon", "25 s pass"), also=True),
]
BY_VARIANT = {variant.name: variant for variant in VARIANTS}
BY_NAME_OF_VARIANT = pytest.mark.parametrize("found", FOUND, ids=[found.variant for found in FOUND])


@BY_NAME_OF_VARIANT
def test_found_history_goes_wrong_with_a_broken_decision(runner: asyncio.Runner, found: Found) -> None:
    variant = BY_VARIANT[found.variant]
    patches = [*(variant.given if found.also else ()), *variant.breaks]
    assert variant.fault in runner.run(live_through(found.steps(), narrow=False, patches=patches))


@BY_NAME_OF_VARIANT
def test_found_history_goes_well_with_the_real_decision(runner: asyncio.Runner, found: Found) -> None:
    patches = BY_VARIANT[found.variant].given if found.also else ()
    assert runner.run(live_through(found.steps(), narrow=False, patches=patches)) == {}


@pytest.mark.parametrize("manner", ["frozen", "idle"])
def test_worker_that_hangs_leaves_its_request_open_without_the_watch(runner: asyncio.Runner, manner: str) -> None:
    history = [BY_NAME[f"next worker is {manner}"], BY_NAME["send plain a"]]
    patches = [left_out("osrdyne.pool.worker_watch.WorkerWatch.look")]
    assert Fault.NO_OUTCOME in runner.run(live_through(history, narrow=True, patches=patches))
    assert runner.run(live_through(history, narrow=True)) == {}


@pytest.mark.parametrize("name", ["delbound", "edge", "fwd"])
def test_search_finds_what_a_broken_decision_does(runner: asyncio.Runner, name: str) -> None:
    @settings(SETTINGS, max_examples=400, phases=[Phase.generate], database=None, derandomize=True)
    @given(HISTORIES)
    def check(history: list[Step]) -> None:
        assert runner.run(live_through(history, narrow=False, patches=BY_VARIANT[name].breaks)) == {}

    with pytest.raises(AssertionError):
        check()

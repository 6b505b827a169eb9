"""The fault suite, short: every family of faults once, faster than one can recover. `make chaos` has more of it."""

import pytest

from tests.chaos.run import Run, report
from tests.chaos.schedule import Family, make_schedule

SEED = 31
"""Hits leader, broker, workers and callers in this time, each of them hard."""
LENGTH, INTERVAL = 16.5, 1.5


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.proves("controller/wall-clock-jumps")
async def test_pool_survives_faults_of_all_kinds_in_sequence(tmp_path):
    faults = make_schedule(SEED, LENGTH, interval=INTERVAL)
    verdict, done = await Run(SEED, faults, tmp_path).execute()
    assert verdict.passed, report(verdict, done, seed=SEED)
    assert {fault.family for fault in done} == set(Family)

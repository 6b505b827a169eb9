"""When a worker gives up on its session."""

from __future__ import annotations

import pytest

from osrdyne_worker.runtime.session_health import SILENCE_TIMEOUT, SessionHealth

Look = tuple[float, dict[str, int]]
STRAY = {"g": 1}


@pytest.mark.parametrize(
    ("idle", "looks", "tolerated"),
    [
        (True, [(now, STRAY) for now in (0.0, 5.0, 29.0, 30.0)], [True, True, True, False]),
        (False, [(now, STRAY) for now in (0.0, 5.0, 119.0, 120.0)], [True, True, True, False]),
        (True, [(0, STRAY), (20, {}), (40, STRAY), (60, STRAY)], [True] * 4),
        (True, [(now, {f"g{now // 10}": 1}) for now in range(0, 200, 5)], [True] * 40),
        # The session did not answer in between, and its figures may be old.
        (True, [(now, STRAY) for now in (0.0, 100.0, 105.0)], [True, True, False]),
    ],
    ids=["idle", "busy", "ended in time", "one after the other", "two looks far apart"],
)
def test_stray_tasks_are_tolerated_for_a_while_only(idle: bool, looks: list[Look], tolerated: list[bool]) -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.answered(strays=strays, idle=idle, now=now) for now, strays in looks]
    assert [reason is None for reason in reasons] == tolerated


def test_silence_that_lasts_is_the_end_of_a_session_and_an_answer_ends_the_silence() -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.timed_out(now=now) for now in (0.0, SILENCE_TIMEOUT - 1, SILENCE_TIMEOUT)]
    assert [reason is None for reason in reasons] == [True, True, False]
    watch = SessionHealth(30.0)
    watch.timed_out(now=0.0)
    watch.answered(strays={}, idle=True, now=10.0)
    assert watch.timed_out(now=SILENCE_TIMEOUT + 1) is None

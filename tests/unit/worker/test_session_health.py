"""When a worker gives up on its session."""

from __future__ import annotations

from osrdyne_worker.runtime.session_health import SILENCE_TIMEOUT, SessionHealth


def test_stray_tasks_are_tolerated_for_a_while_only() -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.answered(strays={"g": 2}, idle=True, now=now) for now in (0.0, 5.0, 29.0, 30.0)]
    assert reasons[:3] == [None, None, None]
    assert "still runs 2 tasks" in (reasons[3] or "")


def test_busy_worker_tolerates_stray_tasks_for_longer() -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.answered(strays={"g": 1}, idle=False, now=now) for now in (0.0, 5.0, 119.0, 120.0)]
    assert [text is None for text in reasons] == [True, True, True, False]


def test_tasks_that_end_in_time_are_forgotten() -> None:
    watch = SessionHealth(30.0)
    looks: list[tuple[float, dict[str, int]]] = [(0, {"g": 1}), (20, {}), (40, {"g": 1}), (60, {"g": 1})]
    assert [watch.answered(strays=strays, idle=True, now=now) for now, strays in looks] == [None] * 4


def test_groups_that_are_just_being_cancelled_one_after_the_other_do_no_harm() -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.answered(strays={f"g{now // 10}": 1}, idle=True, now=now) for now in range(0, 200, 5)]
    assert reasons == [None] * 40


def test_two_checks_far_apart_are_too_few() -> None:
    """The session did not answer in between, and its figures may be old."""
    watch = SessionHealth(30.0)
    reasons = [watch.answered(strays={"g": 1}, idle=True, now=now) for now in (0.0, 100.0, 105.0)]
    assert [text is None for text in reasons] == [True, True, False]


def test_silence_that_lasts_is_the_end_of_a_session() -> None:
    watch = SessionHealth(30.0)
    reasons = [watch.timed_out(now=now) for now in (0.0, SILENCE_TIMEOUT - 1, SILENCE_TIMEOUT)]
    assert reasons[:2] == [None, None]
    assert "has not answered for 120 s" in (reasons[2] or "")


def test_answer_ends_the_silence() -> None:
    watch = SessionHealth(30.0)
    watch.timed_out(now=0.0)
    watch.answered(strays={}, idle=True, now=10.0)
    assert watch.timed_out(now=SILENCE_TIMEOUT + 1) is None

"""What a run of the fault suite prints."""

from __future__ import annotations

from tests.chaos.checker import Aftermath, Answered, Sent, judge
from tests.chaos.run import report
from tests.chaos.schedule import make_schedule

ASKED = Sent("abc", "a", "right", confirmed=True, at=0.0)
FAULTS = make_schedule(1, 60)


def test_good_run_says_that_nothing_is_lost_or_unanswered() -> None:
    answers = [Answered("abc", "ok", "right", at=1.0)]
    lines = report(judge([ASKED], answers, Aftermath(), done=()), FAULTS, seed=1).splitlines()
    assert {"seed: 1", "requests: 1 confirmed, 0 not confirmed", "answers: ok 1"} < set(lines)
    assert {"duplicates: 0", "tried again: 0 requests, 0 times", "lost: 0", "unanswered: 0"} < set(lines)


def test_bad_run_names_what_was_lost_and_every_problem() -> None:
    verdict = judge([ASKED], [], Aftermath(groups=["a"]), done=())
    lines = report(verdict, FAULTS, seed=1).splitlines()
    assert {"lost: 1 abc", "problem: groups left over: a"} < set(lines)

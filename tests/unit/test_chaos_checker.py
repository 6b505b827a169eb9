"""The judge of the fault suite: each thing it promises to notice, it notices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osrdyne.protocol.statuses import Status
from tests.chaos.checker import Aftermath, Answered, Sent, Verdict, allowed_statuses, judge
from tests.chaos.schedule import Action, Family, Fault, Target

ASKED = Sent("1", "a", "right", confirmed=True, at=0.0)
ANSWER = Answered("1", "ok", "right", at=1.0)
ANYTHING = frozenset(Status)


def judged(
    *answers: Answered,
    sent: tuple[Sent, ...] = (ASKED,),
    aftermath: Aftermath | None = None,
    allowed: frozenset[Status] = ANYTHING,
) -> Verdict:
    return judge(sent, answers, aftermath or Aftermath(), allowed=allowed)


def fault(family: Family, action: Action, target: Target) -> Fault:
    return Fault(0.0, family, action, target, 1.0, 0.5)


def test_answered_request_passes() -> None:
    verdict = judged(ANSWER)
    assert verdict.passed
    assert (verdict.requests, verdict.duplicates, dict(verdict.statuses)) == (1, 0, {"ok": 1})


def test_confirmed_request_without_an_answer_is_lost() -> None:
    verdict = judged()
    assert verdict.lost == ("1",)
    assert not verdict.passed


def test_poison_without_an_answer_is_unanswered_and_not_lost() -> None:
    verdict = judged(aftermath=Aftermath(poison=["1"]))
    assert (verdict.lost, verdict.unanswered) == ((), ("1",))
    assert not verdict.passed


def test_poison_that_was_answered_passes() -> None:
    assert judged(replace(ANSWER, status="delivery_limit"), aftermath=Aftermath(poison=["1"])).passed


def test_delivery_limit_without_an_entry_in_the_inventory_is_a_problem() -> None:
    assert "inventory: 1" in judged(replace(ANSWER, status="delivery_limit")).problems[0]


def test_request_without_a_confirm_is_owed_nothing() -> None:
    verdict = judged(sent=(replace(ASKED, confirmed=False),))
    assert verdict.passed
    assert (verdict.requests, verdict.unconfirmed) == (0, 1)


def test_second_answer_is_a_duplicate_and_no_problem() -> None:
    verdict = judged(ANSWER, ANSWER)
    assert verdict.passed
    assert verdict.duplicates == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (replace(ANSWER, body="wrong"), "wrong answers"),
        (replace(ANSWER, status="error"), "no fault explains"),
        (replace(ANSWER, correlation_id="2"), "nobody's request"),
    ],
    ids=["body", "status", "correlation id"],
)
def test_answer_that_cannot_be_right_is_a_problem(answer: Answered, problem: str) -> None:
    verdict = judged(ANSWER, answer, allowed=frozenset({Status.OK}))
    assert [problem in found for found in verdict.problems] == [True]


@pytest.mark.parametrize(
    "aftermath",
    [
        Aftermath(queues=["chaos-req-a"]),
        Aftermath(messages={"chaos-orphan": 1}),
        Aftermath(workers=["a 1"]),
        Aftermath(groups=["a"]),
        Aftermath(leaders=0),
        Aftermath(leaders=2),
        Aftermath(twins=["a [1, 2]"]),
        Aftermath(two_leaders=["once"]),
        Aftermath(tracebacks=["daemon-a"]),
        Aftermath(ended=["daemon-a"]),
    ],
    ids=str,
)
def test_each_thing_left_over_is_a_problem(aftermath: Aftermath) -> None:
    verdict = judged(ANSWER, aftermath=aftermath)
    assert len(verdict.problems) == 1
    assert not verdict.passed


def test_request_that_kills_its_worker_cannot_be_answered_ok() -> None:
    assert "wrong answers" in judged(ANSWER, sent=(replace(ASKED, expected=None),)).problems[0]


def test_many_examples_of_a_problem_are_cut_short() -> None:
    problem = judged(ANSWER, aftermath=Aftermath(queues=[f"q{number}" for number in range(15)])).problems[0]
    assert problem.endswith("q9 and 5 more")


@pytest.mark.parametrize(
    ("faults", "allowed"),
    [
        ([], {Status.OK}),
        ([fault(Family.KILL, Action.KILL, Target.LEADER)], {Status.OK}),
        ([fault(Family.CUT, Action.CUT, Target.MANAGEMENT)], {Status.OK}),
        ([fault(Family.ALARM, Action.DISK, Target.BROKER)], {Status.OK, Status.EXPIRED}),
        ([fault(Family.CUT, Action.CUT, Target.WORKERS)], {Status.OK, Status.EXPIRED, Status.DELIVERY_LIMIT}),
        ([fault(Family.POISON, Action.REQUEST, Target.KEY)], {Status.OK, Status.EXPIRED, Status.DELIVERY_LIMIT}),
        (
            [fault(Family.KILL, Action.KILL, Target.WORKER)],
            {Status.OK, Status.EXPIRED, Status.DELIVERY_LIMIT, Status.START_FAILED},
        ),
    ],
    ids=["none", "leader", "management", "alarm", "cut workers", "poison", "killed worker"],
)
def test_faults_say_which_statuses_they_allow(faults: list[Fault], allowed: set[Status]) -> None:
    assert allowed_statuses(faults) == allowed

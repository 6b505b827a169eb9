"""The judge of the fault suite: each thing it promises to notice, it notices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osrdyne.protocol.retries import RetryTerms
from osrdyne.protocol.statuses import Status
from tests.chaos.checker import AFTER_EFFECTS, Aftermath, Answered, Sent, Verdict, allowed_statuses, judge
from tests.chaos.rules import Rules
from tests.chaos.schedule import JUMPS, Action, Done, Family, Fault, Target

ASKED = Sent("1", "a", "right", confirmed=True, at=0.0)
ANSWER = Answered("1", "ok", "right", at=1.0)
FLAKY = replace(ASKED, attempts=3)
FAILING = replace(FLAKY, expected=None, fails=True)
FAILURE = replace(ANSWER, status="error")
RULES = Rules(RetryTerms(("503",), 3, (1_000, 10_000)), None, cleans=False)


def judged(
    *answers: Answered,
    sent: tuple[Sent, ...] = (ASKED,),
    aftermath: Aftermath | None = None,
    done: tuple[Done, ...] = (),
    rules: Rules | None = None,
) -> Verdict:
    return judge(sent, answers, aftermath or Aftermath(), done=done, rules=rules)


def fault(family: Family, action: Action, target: Target, *, draw: float = 0.5) -> Fault:
    return Fault(0.0, family, action, target, 1.0, draw)


POISON = Done(fault(Family.POISON, Action.REQUEST, Target.KEY), began=0.0, ended=0.0)


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
    assert judged(replace(ANSWER, status="delivery_limit"), aftermath=Aftermath(poison=["1"]), done=(POISON,)).passed


@pytest.mark.parametrize("status", ["delivery_limit", "poison"])
def test_delivery_limit_without_an_entry_in_the_inventory_is_a_problem(status: str) -> None:
    assert "inventory: 1" in judged(replace(ANSWER, status=status), done=(POISON,)).problems[0]


def test_text_that_ends_workers_is_refused_without_an_entry() -> None:
    killer, answer = replace(ASKED, expected=None), replace(ANSWER, status="poison")
    assert judged(answer, sent=(killer,), done=(POISON,)).passed
    assert not judged(answer, sent=(killer,)).passed


@pytest.mark.parametrize("target", [Target.LEADER, Target.NODE])
def test_refused_text_is_rejected_by_a_leader_that_does_not_know_it(target: Target) -> None:
    faults = [POISON.fault, fault(Family.KILL, Action.KILL, target)]
    assert Status.REJECTED in allowed_statuses(faults, waited=1.0, rules=RULES)
    assert Status.REJECTED not in allowed_statuses(faults[:1], waited=1.0, rules=RULES)


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
        (replace(ANSWER, correlation_id="2"), "no known request"),
    ],
    ids=["body", "status", "correlation id"],
)
def test_answer_that_cannot_be_right_is_a_problem(answer: Answered, problem: str) -> None:
    verdict = judged(ANSWER, answer)
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
        ([fault(Family.ALARM, Action.DISK, Target.NODE)], {Status.OK, Status.EXPIRED}),
        (
            [fault(Family.CUT, Action.CUT, Target.WORKERS)],
            {Status.OK, Status.EXPIRED, Status.DELIVERY_LIMIT, Status.POISON},
        ),
        (
            [fault(Family.POISON, Action.REQUEST, Target.KEY)],
            {Status.OK, Status.EXPIRED, Status.DELIVERY_LIMIT, Status.POISON},
        ),
        (
            [fault(Family.KILL, Action.KILL, Target.WORKER)],
            {Status.OK, Status.EXPIRED, Status.DELIVERY_LIMIT, Status.POISON, Status.START_FAILED},
        ),
    ],
    ids=["none", "leader", "management", "alarm", "cut workers", "poison", "killed worker"],
)
def test_faults_say_which_statuses_they_allow(faults: list[Fault], allowed: set[Status]) -> None:
    assert allowed_statuses(faults, waited=60.0) == allowed


@pytest.mark.parametrize("target", [Target.LEADER, Target.STANDBY])
def test_every_request_of_a_managed_pool_needs_the_controllers(target: Target) -> None:
    stopped = [fault(Family.STOP, Action.STOP, target)]
    assert allowed_statuses(stopped, waited=60.0, rules=RULES) == {Status.OK, Status.EXPIRED}


def test_request_cannot_expire_before_its_time() -> None:
    assert Status.EXPIRED not in allowed_statuses([fault(Family.KILL, Action.KILL, Target.NODE)], waited=10.0)


@pytest.mark.parametrize("action", [Action.AHEAD, Action.BEHIND])
@pytest.mark.parametrize(("jump", "early"), [(3.0, False), (90.0, True), (3600.0, True)])
def test_only_a_clock_that_is_far_off_ends_a_request_early(action: Action, jump: float, early: bool) -> None:
    wrong = fault(Family.CLOCK, action, Target.LEADER, draw=JUMPS.index(jump) / len(JUMPS))
    assert (Status.EXPIRED in allowed_statuses([wrong], waited=1.0)) is early


@pytest.mark.parametrize(
    ("began", "ended", "explains"),
    [(100.0, 101.0, True), (103.0, 104.0, False), (10.0, 20.0, False), (10.0, 110.0 - AFTER_EFFECTS, True)],
    ids=["meanwhile", "after the answer", "long before", "shortly before"],
)
def test_fault_explains_only_what_happens_in_its_time(began: float, ended: float, explains: bool) -> None:
    request, answer = replace(ASKED, at=101.0), replace(ANSWER, status="start-failed", at=102.0)
    killed = Done(fault(Family.KILL, Action.KILL, Target.WORKER), began, ended)
    assert judged(answer, sent=(request,), done=(killed,)).passed is explains


@pytest.mark.parametrize(("cleans", "allowed"), [(True, True), (False, False)])
def test_only_a_controller_that_cleans_queues_can_use_up_deliveries(cleans: bool, allowed: bool) -> None:
    killed = [fault(Family.KILL, Action.KILL, Target.LEADER)]
    statuses = allowed_statuses(killed, waited=1.0, rules=replace(RULES, cleans=cleans))
    assert (Status.DELIVERY_LIMIT in statuses) is allowed


@pytest.mark.parametrize(
    ("request_", "answer"),
    [(FLAKY, replace(ANSWER, attempts=3)), (FAILING, replace(FAILURE, attempts=3))],
    ids=["comes right", "fails"],
)
def test_request_that_got_all_its_attempts_passes_and_is_counted(request_: Sent, answer: Answered) -> None:
    verdict = judged(answer, answer, sent=(request_,), rules=RULES)
    assert verdict.passed
    assert (verdict.tried_again, verdict.further_attempts) == (1, 2)


@pytest.mark.parametrize(
    ("request_", "answer", "problem"),
    [
        (FLAKY, replace(ANSWER, attempts=2), "wrong answers"),
        (FLAKY, replace(FAILURE, attempts=3), "no fault explains"),
        (FLAKY, replace(FAILURE, attempts=2), "no fault explains"),
        (FAILING, replace(FAILURE, attempts=4), "no fault explains"),
        (FAILING, replace(ANSWER, attempts=3), "wrong answers"),
    ],
    ids=["too few", "fails at the last", "given up", "too many", "no failure"],
)
def test_request_that_did_not_get_its_attempts_is_a_problem(request_: Sent, answer: Answered, problem: str) -> None:
    verdict = judged(answer, sent=(request_,), rules=RULES)
    assert [problem in found for found in verdict.problems] == [True]


@pytest.mark.parametrize(
    ("during", "waited", "explained"),
    [
        (fault(Family.CUT, Action.STALL, Target.WORKERS), 1.0, True),
        (fault(Family.ALARM, Action.DISK, Target.NODE), 1.0, False),
        (fault(Family.ALARM, Action.DISK, Target.NODE), 41.0, True),
        (fault(Family.CUT, Action.CUT, Target.MANAGEMENT), 41.0, False),
    ],
    ids=["no confirm", "in time", "too late", "nothing to do with it"],
)
def test_failure_before_the_last_attempt_needs_a_fault_that_explains_it(
    during: Fault, waited: float, explained: bool
) -> None:
    answer = replace(FAILURE, attempts=2, at=waited)
    assert judged(answer, sent=(FLAKY,), done=(Done(during, 0.0, 1.0),), rules=RULES).passed is explained

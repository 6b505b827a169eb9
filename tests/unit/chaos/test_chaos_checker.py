"""The fault suite: its judge notices each thing that it promises to, and one seed gives one schedule and one pool."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.protocol.retries import RetryTerms
from osrdyne.protocol.statuses import Status
from tests.chaos.checker import (
    AFTER_EFFECTS,
    LEADER_TIME,
    LIFETIME,
    Aftermath,
    Answered,
    Sent,
    Verdict,
    allowed_statuses,
    judge,
    unexplained_absences,
)
from tests.chaos.rules import Rules, draw_rules
from tests.chaos.schedule import LONGEST, POSSIBLE, Action, Done, Family, Fault, Target, count_families, make_schedule

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


def test_confirmed_request_is_owed_one_answer():
    verdict = judged(ANSWER, ANSWER)
    assert verdict.passed
    assert (verdict.requests, verdict.duplicates, dict(verdict.statuses)) == (1, 1, {"ok": 2})
    unconfirmed = judged(sent=(replace(ASKED, confirmed=False),))
    assert unconfirmed.passed
    assert (unconfirmed.requests, unconfirmed.unconfirmed) == (0, 1)
    for aftermath, lost, unanswered in ((Aftermath(), ("1",), ()), (Aftermath(poison=["1"]), (), ("1",))):
        verdict = judged(aftermath=aftermath)
        assert (verdict.lost, verdict.unanswered, verdict.passed) == (lost, unanswered, False)


@pytest.mark.parametrize("status", ["delivery_limit", "poison"])
def test_delivery_limit_needs_an_entry_in_the_inventory(status):
    answer = replace(ANSWER, status=status)
    assert judged(answer, aftermath=Aftermath(poison=["1"]), done=(POISON,)).passed
    assert "inventory: 1" in judged(answer, done=(POISON,)).problems[0]
    # But not for a text that is known to end workers.
    killer, refused = replace(ASKED, expected=None), replace(ANSWER, status="poison")
    assert judged(refused, sent=(killer,), done=(POISON,)).passed
    assert not judged(refused, sent=(killer,)).passed


@pytest.mark.parametrize(
    ("request_", "answer", "problem"),
    [
        (ASKED, replace(ANSWER, body="wrong"), "wrong answers"),
        (ASKED, replace(ANSWER, status="error"), "no fault explains"),
        (ASKED, replace(ANSWER, correlation_id="2"), "no known request"),
        (replace(ASKED, expected=None), ANSWER, "wrong answers"),
        (FLAKY, replace(ANSWER, attempts=2), "wrong answers"),
        (FLAKY, replace(FAILURE, attempts=3), "no fault explains"),
        (FLAKY, replace(FAILURE, attempts=2), "no fault explains"),
        (FAILING, replace(FAILURE, attempts=4), "no fault explains"),
        (FAILING, replace(ANSWER, attempts=3), "wrong answers"),
    ],
    ids=["body", "status", "correlation", "killer", "too few", "fails at last", "given up", "too many", "no failure"],
)
def test_answer_that_cannot_be_right_is_a_problem(request_, answer, problem):
    others = [] if answer.correlation_id == request_.correlation_id else [ANSWER]
    verdict = judged(*others, answer, sent=(request_,), rules=RULES if request_.attempts > 1 else None)
    assert [problem in found for found in verdict.problems] == [True]


def test_each_thing_left_over_is_a_problem():
    left: list[dict[str, Any]] = [
        {"queues": ["chaos-req-a"]}, {"messages": {"chaos-orphan": 1}}, {"workers": ["a 1"]}, {"groups": ["a"]},
        {"leaders": 0}, {"leaders": 2}, {"twins": ["a [1, 2]"]}, {"two_leaders": ["once"]}, {"tracebacks": ["a"]},
        {"ended": ["daemon-a"]}, {"leaderless": [(0.0, LEADER_TIME + 1)]},
    ]  # fmt: skip
    for one in left:
        verdict = judged(ANSWER, aftermath=Aftermath(**one))
        assert (len(verdict.problems), verdict.passed) == (1, False), one


USED_UP = {Status.OK, Status.EXPIRED, Status.DELIVERY_LIMIT, Status.POISON}


KILLED_LEADER = fault(Family.KILL, Action.KILL, Target.LEADER)


@pytest.mark.parametrize(
    ("faults", "waited", "allowed", "rules"),
    [
        ([], 60.0, {Status.OK}, None),
        ([KILLED_LEADER], 60.0, {Status.OK}, None),
        ([fault(Family.CUT, Action.CUT, Target.MANAGEMENT)], 60.0, {Status.OK}, None),
        ([fault(Family.ALARM, Action.DISK, Target.NODE)], 60.0, {Status.OK, Status.EXPIRED}, None),
        ([fault(Family.ALARM, Action.DISK, Target.NODE)], 10.0, {Status.OK}, None),
        ([fault(Family.CUT, Action.CUT, Target.WORKERS)], 60.0, USED_UP, None),
        ([POISON.fault], 60.0, USED_UP, None),
        ([POISON.fault], 1.0, USED_UP - {Status.EXPIRED}, RULES),
        ([POISON.fault, KILLED_LEADER], 1.0, USED_UP - {Status.EXPIRED} | {Status.REJECTED}, RULES),
        ([fault(Family.KILL, Action.KILL, Target.WORKER)], 60.0, USED_UP | {Status.START_FAILED}, None),
        ([fault(Family.STOP, Action.STOP, Target.LEADER)], 60.0, {Status.OK, Status.EXPIRED}, RULES),
        ([fault(Family.STOP, Action.STOP, Target.STANDBY)], 60.0, {Status.OK, Status.EXPIRED}, RULES),
        ([KILLED_LEADER], 1.0, {Status.OK}, RULES),
        ([fault(Family.HOSTILE, Action.DEEP, Target.REQUESTS)], 1.0, {Status.OK}, RULES),
        ([fault(Family.POLICY, Action.FOREIGN, Target.QUEUES)], 1.0, {Status.OK}, RULES),
        ([fault(Family.POLICY, Action.OPERATOR, Target.QUEUES)], 1.0, {Status.OK, Status.EXPIRED}, RULES),
        ([fault(Family.IMPORT, Action.IMPORT, Target.KEY)], 1.0, {Status.OK}, RULES),
        ([fault(Family.PERMISSION, Action.FORBID, Target.WORKERS)], 60.0, {Status.OK, Status.EXPIRED}, RULES),
        ([KILLED_LEADER], 1.0, {Status.OK, Status.DELIVERY_LIMIT}, replace(RULES, cleans=True)),
    ],
)
def test_faults_allow_statuses(faults, waited, allowed, rules):
    assert allowed_statuses(faults, waited=waited, rules=rules) == allowed


def test_fault_explains_only_what_happens_in_its_time():
    request, answer = replace(ASKED, at=101.0), replace(ANSWER, status="start-failed", at=102.0)
    meanwhile, shortly_before = (100.0, 101.0), (10.0, 110.0 - AFTER_EFFECTS)
    after_the_answer, long_before = (103.0, 104.0), (10.0, 20.0)
    found = []
    for began, ended in (meanwhile, shortly_before, after_the_answer, long_before):
        killed = Done(fault(Family.KILL, Action.KILL, Target.WORKER), began, ended)
        found.append(judged(answer, sent=(request,), done=(killed,)).passed)
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("request_", "pooled", "passed"),
    [(ASKED, False, True), (ASKED, True, False), (FAILING, True, False), (replace(ASKED, expected=None), True, True)],
)
def test_only_what_ends_pooled_processes_may_use_up_its_attempts(request_: Sent, pooled: bool, passed: bool) -> None:
    answer, kept = replace(ANSWER, status="delivery_limit"), Aftermath(poison=["1"])
    assert judge([request_], [answer], kept, done=[POISON], pooled=pooled).passed is passed


@pytest.mark.parametrize(
    ("faults", "found"),
    [
        ([], ["for 60 s"]),
        ([(Target.NODE, 25.0, 35.0)], []),
        ([(Target.NODE, 25.0, 35.0), (Target.NODE, 0.0, 1.0)], []),
        ([(Target.NODE, 0.0, 20.0)], ["for 40 s"]),
        ([(Target.REQUESTS, 50.0, 50.0)], ["for 50 s"]),
        ([(Target.KEY, 25.0, 35.0)], ["for 60 s"]),
    ],
)
def test_daemon_leads_soon_after_the_last_fault(faults: list[tuple[Target, float, float]], found: list[str]) -> None:
    done = [Done(fault(Family.KILL, Action.KILL, target), 100 + began, 100 + ended) for target, began, ended in faults]
    assert unexplained_absences([(100.0, 160.0)], done) == found


@given(st.integers(0, 2**32))
def test_faults_are_possible_in_order_and_within_the_run_and_requests_get_all_their_attempts(seed):
    faults = make_schedule(seed, 300)
    assert make_schedule(seed, 300) == faults
    for fault in faults:
        targets, actions = POSSIBLE[fault.family]
        assert fault.target in targets and fault.action in actions
        assert 0 <= fault.seconds <= LONGEST[fault.action]
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert faults[-1].at <= 300
    retry = draw_rules(seed).retry
    delays = [retry.delay_ms(attempt) for attempt in range(1, retry.max_attempts)]
    assert retry.covers(503)
    assert sum(delays) / 1000 < LIFETIME / 1.5


def test_every_family_gets_its_share_and_every_action_and_target_is_drawn():
    schedules = [make_schedule(seed, 1800) for seed in range(20)]
    assert min(min(count_families(schedule).values()) for schedule in schedules) >= 18
    drawn = {(fault.family, fault.action, fault.target) for schedule in schedules for fault in schedule}
    possible = {family: itertools.product(actions, targets) for family, (targets, actions) in POSSIBLE.items()}
    assert drawn == {(family, *pair) for family, pairs in possible.items() for pair in pairs}

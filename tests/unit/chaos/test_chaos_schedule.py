"""Schedules and rules of the fault suite: the same for the same seed, and every family gets its share."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from osrdyne.config.models import RequestSettings
from osrdyne.ingress.routes.manifest import load_manifest
from tests.chaos.checker import LIFETIME
from tests.chaos.rules import draw_rules
from tests.chaos.schedule import INTERVAL, LONGEST, POSSIBLE, Family, count_families, make_schedule


def test_same_seed_gives_the_same_schedule() -> None:
    assert make_schedule(7, 600) == make_schedule(7, 600)
    assert make_schedule(7, 600) != make_schedule(8, 600)
    assert make_schedule(1, INTERVAL - 1) == ()
    assert {fault.family for fault in make_schedule(1, 300, [Family.CUT, Family.KILL])} == {Family.CUT, Family.KILL}


@given(st.integers(0, 2**32))
def test_faults_are_possible_in_order_and_within_the_run(seed: int) -> None:
    faults = make_schedule(seed, 300)
    for fault in faults:
        targets, actions = POSSIBLE[fault.family]
        assert fault.target in targets
        assert fault.action in actions
        assert 0 <= fault.seconds <= LONGEST[fault.action]
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert faults[-1].at <= 300


def test_every_family_gets_its_share_and_every_action_and_target_is_drawn() -> None:
    schedules = [make_schedule(seed, 1800) for seed in range(20)]
    assert min(min(count_families(schedule).values()) for schedule in schedules) >= 20
    drawn = {(fault.family, fault.action, fault.target) for schedule in schedules for fault in schedule}
    assert drawn == {
        (family, action, target)
        for family, (targets, actions) in POSSIBLE.items()
        for target in targets
        for action in actions
    }


@given(st.integers(0, 2**32))
def test_manifest_shows_what_the_rules_are(seed: int) -> None:
    rules = draw_rules(seed)
    assert draw_rules(seed) == rules
    manifest = load_manifest(json.dumps({"routes": rules.routes()}))
    assert [(route.retry, route.priority) for route in manifest.routes if route.retry] == [
        (rules.retry, rules.priority)
    ]
    assert RequestSettings.model_validate(rules.settings()).check_entire_queue_on_cleanup is rules.cleans


@given(st.integers(0, 2**32))
def test_request_gets_all_its_attempts_long_before_its_time_is_over(seed: int) -> None:
    retry = draw_rules(seed).retry
    delays = [retry.delay_ms(attempt) for attempt in range(1, retry.max_attempts)]
    assert retry.covers(503)
    assert sum(delays) / 1000 < LIFETIME / 1.5

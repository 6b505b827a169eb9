"""The settings of a managed pool under attack: the same for the same seed, and no request runs out of time by it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.config.models import RequestSettings
from osrdyne.ingress.requests import sample_arrival
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.ingress.routes.table import RouteTable
from tests.chaos.checker import LIFETIME
from tests.chaos.rules import APP_ID, draw_rules


@given(st.integers(0, 2**32))
def test_manifest_shows_what_the_rules_are(seed: int) -> None:
    rules = draw_rules(seed)
    assert draw_rules(seed) == rules
    manifest = load_manifest(json.dumps({"routes": rules.routes()}))
    assert [(route.retry, route.priority) for route in manifest.routes if route.retry] == [
        (rules.retry, rules.priority)
    ]
    assert RequestSettings.model_validate(rules.settings()).check_entire_queue_on_cleanup is rules.cleans


@pytest.mark.parametrize(
    ("path", "route"), [("/flaky", "flaky"), ("/echo", "echo"), ("/crash", "crash"), ("/sleep", "rest")]
)
def test_each_path_of_the_callers_takes_its_route(path: str, route: str) -> None:
    table = RouteTable(load_manifest(json.dumps({"routes": draw_rules(1).routes()})))
    arrival = sample_arrival("a", path, headers={}, body=None, app_id=APP_ID, timeout=None, now=0.0)
    assert [winner.name for winner in table.winners(arrival)] == [route]


@given(st.integers(0, 2**32))
def test_request_gets_all_its_attempts_long_before_its_time_is_over(seed: int) -> None:
    retry = draw_rules(seed).retry
    delays = [retry.delay_ms(attempt) for attempt in range(1, retry.max_attempts)]
    assert retry.covers(503)
    assert sum(delays) / 1000 < LIFETIME / 1.5

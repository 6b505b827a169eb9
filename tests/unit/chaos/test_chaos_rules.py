"""The settings of a managed pool under attack: the same for the same seed, and no request runs out of time by it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from osrdyne.config.models import RequestSettings
from osrdyne.ingress.routes.manifest import load_manifest
from tests.chaos.checker import LIFETIME
from tests.chaos.rules import draw_rules


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

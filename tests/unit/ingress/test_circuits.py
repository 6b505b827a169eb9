"""The circuit breaker: when it opens, what it lets through, how it recovers, and what a new leader knows.

Samples, ratios, the order of groups and of probes, and changes of the configuration are compared with an independent
model in `tests/component/ingress/test_circuit_sequences.py`.
"""

from dataclasses import replace

import pytest

from osrdyne.ingress.circuits import breaker as breaker_module
from osrdyne.ingress.circuits.breaker import CircuitBreaker, PauseGroup, SendProbe, Verdict
from osrdyne.ingress.circuits.configuration import CircuitConfiguration, OnOpen, TimedStep
from osrdyne.ingress.circuits.samples import succeeded
from osrdyne.ingress.circuits.state import CircuitId, CircuitState, state_from_json
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.protocol.names import Key

NOW = 1_700_000_000_000
ROUTE = CircuitId("r")
CONFIGURATION = CircuitConfiguration(
    checks=True,
    updates_statistics=True,
    error_threshold=50,
    min_samples=4,
    max_samples=10,
    open_to_half_open=TimedStep(enabled=True, interval_ms=1_000),
    unlock=TimedStep(enabled=True, interval_ms=200),
    probe=TimedStep(enabled=True, interval_ms=500),
)


def opened(configuration: CircuitConfiguration = CONFIGURATION, keys: str = "abcd") -> CircuitBreaker:
    """Open since `NOW`, the groups paused in the order of `keys`."""
    breaker = CircuitBreaker(configuration)
    for number, key in enumerate(keys):
        breaker.record("r", Key(key), f"request {number}", success=False, now_ms=NOW)
    assert breaker.state_of(ROUTE) is CircuitState.OPEN
    return breaker


def test_outcome_counts_by_its_code():
    outcomes: dict[bool | None, list[tuple[str, int | None]]] = {
        True: [("ok", None), ("ok", 204), ("error", 409)],
        False: [("ok", 300), ("error", None), ("error", 503), ("retried", 200)],
        None: [("expired", 504)],
    }
    outcomes[False] += [(status, None) for status in ("delivery_limit", "start-failed", "poison", "unknown")]
    outcomes[None] += [(one, None) for one in ("cancelled", "abandoned", "reply-to-refused", "capacity", "no-route")]
    for expected, found in outcomes.items():
        assert [succeeded(*outcome) for outcome in found] == [expected] * len(found)


def test_closed_circuits_are_forgotten_before_there_are_too_many(monkeypatch):
    monkeypatch.setattr(breaker_module, "MAX_CIRCUITS", 2)
    breaker = opened()
    for route in ("second", "third"):
        breaker.record(route, Key("k"), "request", success=True, now_ms=NOW)
    assert [circuit_id.route for circuit_id in breaker.state.circuits] == ["r", "third"]
    hashes = {CircuitId(route, key).hash for route in ("r", None, "") for key in (Key("k"), Key(""), None)}
    assert (len(hashes), CircuitId("r").hash) == (9, "cf65d21d5536356e")


def test_rejected_request_learns_when_the_circuit_is_half_open_unless_only_a_person_knows():
    breaker = opened(replace(CONFIGURATION, on_open=OnOpen.REJECT))
    admission = breaker.admit("r", Key("a"), now_ms=NOW + 300)
    assert (admission.verdict, admission.retry_after_ms) == (Verdict.REJECT, 700)
    off = TimedStep(enabled=False, interval_ms=1_000)
    breaker = opened(replace(CONFIGURATION, on_open=OnOpen.REJECT, open_to_half_open=off))
    assert breaker.admit("r", Key("a"), now_ms=NOW).retry_after_ms is None
    assert breaker.next_step_ms() is None


def test_rejecting_circuit_holds_the_request_that_it_needs_as_a_probe():
    breaker = opened(replace(CONFIGURATION, on_open=OnOpen.REJECT), keys="aaaa")
    assert breaker.advance(now_ms=NOW + 1_000)[1:] == (SendProbe(ROUTE, Key("a")),)
    breaker.probe_missing(ROUTE, now_ms=NOW + 1_000)
    admission = breaker.admit("r", Key("b"), now_ms=NOW + 1_000)
    assert (admission.verdict, admission.effects) == (Verdict.HOLD, (PauseGroup(Key("b")), SendProbe(ROUTE, Key("b"))))
    rejected = breaker.admit("r", Key("b"), now_ms=NOW + 1_200)
    assert (rejected.verdict, rejected.retry_after_ms) == (Verdict.REJECT, 300)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"version": 2}, "version"),
        ({"now": -1}, "now"),
        ({"paused": ["a"]}, "paused"),
        ({"paused": ["a", "a"]}, "paused"),
        ({"circuits": {}}, "circuits"),
        ({"state": "ajar"}, "circuits[0].state"),
        ({"state": "closed"}, "circuits[0].held"),
        ({"route": 1}, "circuits[0].route"),
        ({"keys": ["\ud800"]}, "circuits[0].keys[0]"),
        ({"failures": [["request", 9, 0]]}, "circuits[0].failures[0]"),
        ({"failures": [["one", 0, 2], ["two", 0, 1]]}, "circuits[0].failures"),
        ({"successes": [["request 0", 0, 0]]}, "circuits[0].failures"),
        ({"candidates": ["z"]}, "circuits[0].candidates"),
        ({"probe": {"key": "a", "since": 0, "request": None}}, "circuits[0].probe"),
    ],
)
def test_unreadable_state_is_refused_with_its_path(change, path):
    document = opened().state.to_json()
    [name] = change
    document.update(change) if name in document else document["circuits"][0].update(change)
    with pytest.raises(InvalidDocumentError) as caught:
        state_from_json(document)
    assert [problem.path for problem in caught.value.problems] == [path]

"""The order of the checks at the ingress: the first that decides ends it, and `explain` sees the same."""

from collections.abc import Callable

import pytest

from osrdyne.ingress.acceptance import TtlLimits, accept
from osrdyne.ingress.checks import (
    REQUEST_CHECKS,
    DeliveryCheck,
    IngressChecks,
    Refusal,
    RequestCheck,
)
from osrdyne.ingress.explain import explain
from osrdyne.ingress.requests import Arrival, sample_arrival
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.statuses import Status

LIMITS = TtlLimits(600.0, 604800.0)


def sample(key: str = "a") -> Arrival:
    return sample_arrival(key, "/sql", headers={}, body=None, app_id=None, timeout=None, now=1000.0)


def request_check(name: str, log: list[str], *, refuses: bool = False) -> RequestCheck:
    refusal = Refusal(Status.CAPACITY, name, retry_after_ms=1500) if refuses else None
    return RequestCheck(
        name,
        lambda arrival, now_ms: (log.append(name), refusal)[1],
        passed=lambda arrival: log.append(f"{name} passed"),
        describe=lambda arrival: f"{name} passes",
    )


def delivery_check(decide: Callable[[], Refusal | None], log: list[str]) -> DeliveryCheck:
    return DeliveryCheck(
        "circuit",
        lambda arrival, routed, now_ms: decide(),
        passed=lambda arrival, routed: log.append("passed"),
        describe=lambda arrival, routed: f"the circuit of {routed.key} is closed",
        refused=lambda arrival, routed: log.append("refused"),
    )


@pytest.mark.parametrize("refusing", [*REQUEST_CHECKS, None])
def test_checks_follow_the_order_of_the_module_until_the_first_refusal_and_then_nothing_counts(refusing):
    log: list[str] = []
    checks = IngressChecks([request_check(name, log, refuses=name == refusing) for name in reversed(REQUEST_CHECKS)])
    refusal = checks.refuse_request(sample(), now_ms=0)
    if refusing is None:
        assert refusal is None
        assert log == [*REQUEST_CHECKS, *(f"{name} passed" for name in REQUEST_CHECKS)]
    else:
        assert refusal is not None
        assert (refusal.detail, refusal.retry_after) == (refusing, 1.5)
        assert log == [*REQUEST_CHECKS[: REQUEST_CHECKS.index(refusing) + 1]]


@pytest.mark.parametrize(
    ("refusal", "noted"),
    [(Refusal(Status.CIRCUIT_OPEN, "open"), "refused"), (None, "passed")],
    ids=["refused", "passed"],
)
def test_check_of_a_delivery_learns_the_decision_unless_it_is_only_explained(refusal, noted):
    log: list[str] = []
    checks = IngressChecks((), [delivery_check(lambda: refusal, log)])
    arrival = sample()
    (routed,) = accept(arrival, None, limits=LIMITS)
    assert checks.explain_delivery(arrival, routed, now_ms=0)[0].refusal is refusal
    assert log == []
    assert checks.refuse_delivery(arrival, routed, now_ms=0) is refusal
    assert log == [noted]


def test_explanation_shows_what_each_check_says_and_counts_nothing():
    log: list[str] = []
    checks = IngressChecks([request_check("size", log)], [delivery_check(lambda: None, log)])
    explanation = explain(sample(), None, splitter=None, names=PoolNames("p"), limits=LIMITS, checks=checks)
    steps = {step.name: step.text for step in explanation.steps}
    assert (steps["size"], steps["circuit"]) == ("size passes", "the circuit of a is closed")
    assert (log, explanation.refused, len(explanation.deliveries)) == (["size"], None, 1)

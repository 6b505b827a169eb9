"""The document of the circuit breaker: keys, defaults, bounds and refusals."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.circuits.configuration import (
    DEFAULTS,
    LARGEST_SAMPLE_COUNT,
    LONGEST_AGE_MS,
    LONGEST_INTERVAL_MS,
    CircuitConfiguration,
    CircuitScope,
    OnOpen,
    TimedStep,
    load_circuits,
    load_circuits_json,
)
from osrdyne.ingress.documents.problems import InvalidDocumentError

WORKING = CircuitConfiguration(
    checks=True,
    updates_statistics=True,
    open_to_half_open=TimedStep(enabled=True, interval_ms=1000),
    probe=TimedStep(enabled=True, interval_ms=1000),
)
STEPS = st.builds(TimedStep, enabled=st.booleans(), interval_ms=st.integers(100, LONGEST_INTERVAL_MS))


def refused(document: object) -> list[str]:
    with pytest.raises(InvalidDocumentError) as caught:
        load_circuits(json.dumps(document))
    return [problem.path for problem in caught.value.problems]


@given(
    st.builds(
        CircuitConfiguration,
        checks=st.booleans(),
        updates_statistics=st.booleans(),
        error_threshold=st.integers(1, 100),
        max_age_ms=st.integers(1000, LONGEST_AGE_MS),
        min_samples=st.integers(1, 50),
        max_samples=st.integers(50, LARGEST_SAMPLE_COUNT),
        open_to_half_open=STEPS,
        unlock=STEPS,
        probe=STEPS,
        on_open=st.sampled_from(OnOpen),
        scope=st.sampled_from(CircuitScope),
    )
)
def test_stored_document_is_the_same_configuration(configuration):
    assert load_circuits_json(json.dumps(configuration.document())) == configuration


@pytest.mark.parametrize(
    ("given_keys", "path"),
    [
        ({"circuitCheck": True}, "circuitCheck"),
        ({"openToHalfOpen": {"enable": True}}, "openToHalfOpen.enable"),
        ({"openToHalfOpen": True}, "openToHalfOpen"),
        ({"circuitCheckEnabled": "true"}, "circuitCheckEnabled"),
        ({"statisticsUpdateEnabled": None}, "statisticsUpdateEnabled"),
        ({"errorThresholdPercentage": 0}, "errorThresholdPercentage"),
        ({"errorThresholdPercentage": 101}, "errorThresholdPercentage"),
        ({"errorThresholdPercentage": 90.5}, "errorThresholdPercentage"),
        ({"entriesMaxAgeMS": 999}, "entriesMaxAgeMS"),
        ({"entriesMaxAgeMS": LONGEST_AGE_MS + 1}, "entriesMaxAgeMS"),
        ({"minQueueSampleCount": 0}, "minQueueSampleCount"),
        ({"maxQueueSampleCount": LARGEST_SAMPLE_COUNT + 1}, "maxQueueSampleCount"),
        ({"maxQueueSampleCount": True}, "maxQueueSampleCount"),
        ({"unlockQueues": {"interval": 99}}, "unlockQueues.interval"),
        ({"unlockSampleQueues": {"interval": LONGEST_INTERVAL_MS + 1}}, "unlockSampleQueues.interval"),
        ({"unlockSampleQueues": {"interval": None}}, "unlockSampleQueues.interval"),
        ({"onOpen": "drop"}, "onOpen"),
        ({"circuitScope": None}, "circuitScope"),
        ({"onOpen": 1, "unlockQueues": {"enabled": 1}}, "onOpen unlockQueues.enabled"),
    ],
)
def test_every_wrong_value_is_refused_with_its_path(given_keys, path):
    assert sorted(refused(given_keys)) == path.split()


def test_circuit_that_could_not_open_if_all_requests_fail_is_refused():
    assert refused({"minQueueSampleCount": 10, "maxQueueSampleCount": 9}) == ["minQueueSampleCount"]
    load_circuits('{"minQueueSampleCount": 10, "maxQueueSampleCount": 10}')


def test_what_never_opens_or_never_recovers_is_warned_of():
    configurations: dict[str | None, CircuitConfiguration] = {
        "openToHalfOpen.enabled": replace(WORKING, open_to_half_open=DEFAULTS.open_to_half_open),
        "unlockSampleQueues.enabled": replace(WORKING, probe=DEFAULTS.probe),
        "statisticsUpdateEnabled": replace(WORKING, updates_statistics=False),
    }
    for path, configuration in configurations.items():
        assert [warning.path for warning in configuration.warnings] == [path]
    assert WORKING.warnings == DEFAULTS.warnings == ()

"""The circuit breaker against an independent model, in random sequences."""

from collections import Counter

import pytest
from circuit_model import run_sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osrdyne.ingress.circuits.state import CircuitState


@pytest.mark.parametrize("sequences", [3_000, pytest.param(30_000, marks=pytest.mark.nightly)])
def test_random_sequences_are_as_in_the_model(sequences):
    reached: Counter[CircuitState] = Counter()

    @settings(max_examples=sequences, suppress_health_check=[HealthCheck.too_slow])
    @given(st.binary(min_size=40, max_size=160))
    def run(content: bytes) -> None:
        reached.update(run_sequence(content))

    run()
    # Or the sequences would say little about circuits that open and recover.
    assert min(reached[CircuitState.OPEN], reached[CircuitState.HALF_OPEN]) > sequences / 20, reached

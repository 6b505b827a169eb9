"""The circuit breaker against an independent model, in 10,000 random sequences."""

from collections import Counter

from circuit_model import run_sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osrdyne.ingress.circuits.state import CircuitState

SEQUENCES = 10_000


def test_ten_thousand_sequences_are_as_in_the_model():
    reached: Counter[CircuitState] = Counter()

    @settings(max_examples=SEQUENCES, suppress_health_check=[HealthCheck.too_slow])
    @given(st.binary(min_size=40, max_size=160))
    def run(content: bytes) -> None:
        reached.update(run_sequence(content))

    run()
    # Or the sequences would say little about circuits that open and recover.
    assert min(reached[CircuitState.OPEN], reached[CircuitState.HALF_OPEN]) > SEQUENCES / 20, reached

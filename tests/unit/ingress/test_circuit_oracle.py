"""The circuit breaker against an independent model: random sequences. tests/component has 10,000 of them."""

from __future__ import annotations

from circuit_model import run_sequence
from hypothesis import given
from hypothesis import strategies as st


@given(st.binary(max_size=200))
def test_any_sequence_is_as_in_the_model(content: bytes) -> None:
    run_sequence(content)

"""The adjustment of a proposed policy: every value within the bounds, and where it comes from."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.policies.policy import (
    LEAST_MESSAGE_SIZE,
    LONGEST_LIFETIME,
    MAX_INT,
    SHORTEST_LIFETIME,
    Authorization,
    Bounds,
    Origin,
    Overflow,
    effective_policy,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
BOUNDS = Bounds(max_message_bytes=16 * 2**20, delivery_limit=5)
PROPOSALS = st.fixed_dictionaries(
    {},
    optional={
        "authorization": st.sampled_from(Authorization),
        "overflow": st.sampled_from(Overflow),
        "expiration_instant": st.datetimes(timezones=st.just(UTC)),
        "max_message_size": st.integers(0, 2**40),
        "enqueue_timeout": st.floats(0, 1e9),
        "max_concurrent_readers": st.integers(0, 2**40),
        "max_dequeue_retries": st.integers(0, 2**40),
        "max_message_age": st.floats(0, 1e9),
        "max_queue_length": st.integers(0, 2**40),
        "poison_message_drop": st.text(min_size=1),
    },
)


def test_capacity_is_computed_and_limited_by_the_pool() -> None:
    bounds = Bounds(max_message_bytes=2**20, delivery_limit=5, capacity=2 * 2**20)
    proposed = {"max_queue_length": 10, "max_message_size": 10_000}
    assert effective_policy(proposed, bounds=bounds, now=NOW).max_queue_capacity == 100_000
    assert effective_policy({}, bounds=bounds, now=NOW).max_queue_capacity == 2 * 2**20


@given(PROPOSALS, st.integers(1024, 2**30))
def test_values_are_within_the_bounds_and_name_their_origin(proposed: dict[str, Any], largest: int) -> None:
    policy = effective_policy(proposed, bounds=Bounds(largest, 5), now=NOW)
    assert LEAST_MESSAGE_SIZE <= policy.max_message_size <= max(largest, LEAST_MESSAGE_SIZE)
    assert NOW + SHORTEST_LIFETIME <= policy.expiration_instant <= NOW + LONGEST_LIFETIME
    assert 0 <= policy.enqueue_timeout <= 60
    assert 0 <= policy.max_message_age <= 7 * 86400
    for count in (policy.max_concurrent_readers, policy.max_dequeue_retries, policy.max_queue_length):
        assert 1 <= count <= MAX_INT
    names = {field.name for field in fields(policy)} - {"origins"}
    assert {*policy.origins} == names
    for name in names - {"max_queue_capacity"}:
        expected = {False: Origin.DEFAULT, True: Origin.PROPOSED}[name in proposed]
        if name in proposed and getattr(policy, name) != proposed[name]:
            expected = Origin.CLAMPED
        assert policy.origins[name] is expected

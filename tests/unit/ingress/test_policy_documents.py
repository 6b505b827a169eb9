"""The document of queue policies: read as a whole, refused with every error, and shown with what it means for a key."""

import json
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.config.models import BrokerSettings, PoolSettings, Settings
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.policies.elements import ELEMENTS, update
from osrdyne.ingress.policies.manifest import MAX_POLICIES, PolicyManifest, load_policies, load_policies_json
from osrdyne.ingress.policies.policy import (
    LEAST_MESSAGE_SIZE,
    LONGEST_LIFETIME,
    MAX_INT,
    SHORTEST_LIFETIME,
    Authorization,
    Bounds,
    EffectivePolicy,
    Origin,
    Overflow,
    effective_policy,
)
from osrdyne.ingress.policies.table import PolicyTable, bounds_of, shown, warn_of_clamped

NOW = datetime(2026, 1, 2, tzinfo=UTC)
BOUNDS = bounds_of(Settings(pool=PoolSettings(id="p"), broker=BrokerSettings()))
YAML = """
policies:
  - match: tpch/{scale}
    MaxMessageSize: 100KiB
    MaxMessageAge: PT2M
    EnqueueTimeout: 5s
    MaxQueueLength: 10
    Overflow: DiscardExistingMessage
    ExpirationInstant: 2026-01-03T00:00:00Z
    PoisonMessageDrop: amqp:/queues/graveyard
  - match: "{rest}"
    Authorization: NotRequired
    TransportProtection: None
default:
  MaxQueueLength: 0
  MaxMessageSize: 1
"""


def table(manifest: PolicyManifest) -> PolicyTable:
    return PolicyTable(manifest, bounds=BOUNDS, now=NOW)


def problems_of(document: object) -> list[str]:
    with pytest.raises(InvalidDocumentError) as failure:
        load_policies_json(json.dumps(document))
    return [str(problem) for problem in failure.value.problems]


def test_document_is_stored_as_json_that_loads_to_the_same_policies():
    manifest = load_policies(YAML)
    assert load_policies_json(json.dumps(manifest.document())) == manifest
    assert manifest.document()["policies"][0]["MaxMessageAge"] == 120.0
    assert (manifest.size, load_policies("{}").size) == (3, 0)
    assert [warning.path for warning in manifest.warnings] == ["policies.0.ExpirationInstant"]


def test_first_pattern_that_matches_counts_and_the_default_last():
    policies = table(load_policies(YAML))
    assert [found.match for key in ("tpch/1", "x", "a/b/c") if (found := policies.of(key))] == [
        "tpch/{scale}", "{rest}", None,
    ]  # fmt: skip
    assert table(load_policies('{"policies": [{"match": "a"}]}')).of("b") is None
    assert policies.of("\udcff") == policies.of("a/b/c")


def test_effective_policy_has_all_elements_with_their_origin():
    found = table(load_policies(YAML)).of("tpch/1")
    assert found is not None
    elements = shown(found.policy)
    assert [*elements] == [element.name for element in ELEMENTS]
    assert {element.field for element in ELEMENTS} == {*EffectivePolicy.__dataclass_fields__} - {"origins"}
    assert elements["MaxQueueLength"] == {"value": 10, "origin": "proposed", "acts": True}
    assert (elements["MaxQueueCapacity"]["value"], elements["MaxQueueCapacity"]["origin"]) == (1_024_000, "computed")
    assert found.policy.overflow is Overflow.DISCARD_EXISTING
    assert json.dumps(elements)


def test_value_beyond_the_bounds_is_moved_and_warned_of():
    manifest = load_policies(YAML)
    found = table(manifest).of("a/b/c")
    assert found is not None
    assert (found.policy.max_queue_length, found.policy.max_message_size) == (1, 8192)
    warnings = [str(warning) for warning in warn_of_clamped(manifest, bounds=BOUNDS, now=NOW)]
    assert [warning.partition(":")[0] for warning in warnings] == ["default.MaxMessageSize", "default.MaxQueueLength"]
    assert "8192" in warnings[0]


def test_expiration_that_is_not_written_counts_from_now():
    policies = table(load_policies('{"default": {}}'))
    later = datetime(2026, 1, 5, tzinfo=UTC)
    found = policies.effective("k", now=later)
    assert found is not None
    assert found.policy.expiration_instant == datetime(2026, 1, 6, tzinfo=UTC)


def test_every_error_is_reported_with_its_place_and_no_secret():
    document = {
        "policies": [
            {"match": "a{", "MaxQueueSize": 1},
            {"MaxMessageSize": -1, "Overflow": "Drop", "MaxQueueCapacity": 1},
            {"match": "a", "EnqueueTimeout": "soon", "MaxConcurrentReaders": 1.5, "Authorization": "RequiredToGo"},
            {"match": "a", "ExpirationInstant": "2026-01-01T00:00:00+02:00", "PoisonMessageDrop": "ftp://u:secret@x"},
            {"match": "b", "ExpirationInstant": 5, "MaxConcurrentReaders": True},
        ],
        "default": {"match": "x", "MaxMessageAge": -1},
    }
    problems = problems_of(document)
    assert [problem.partition(": ")[0] for problem in problems] == [
        "policies.0.MaxQueueSize", "policies.0.match", "policies.1.MaxMessageSize", "policies.1.Overflow",
        "policies.1.MaxQueueCapacity", "policies.1.match", "policies.2.EnqueueTimeout",
        "policies.2.MaxConcurrentReaders", "policies.2.Authorization", "policies.3.ExpirationInstant",
        "policies.3.PoisonMessageDrop", "policies.3.match", "policies.4.ExpirationInstant",
        "policies.4.MaxConcurrentReaders", "default.match", "default.MaxMessageAge",
    ]  # fmt: skip
    assert "secret@" not in "".join(problems)


def test_document_that_is_no_list_or_too_long_is_refused():
    many = {"policies": [{"match": f"{number}"} for number in range(MAX_POLICIES + 1)]}
    assert [len(problems_of(document)) for document in ([], {"policies": {}}, many)] == [1, 1, 1]


def test_table_of_the_reference_is_what_the_elements_say():
    page = (Path(__file__).parents[3] / "docs/reference/policies.md").read_text(encoding="utf-8")
    assert page == update(page), "run `python -m osrdyne.ingress.policies.elements`"


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


def test_capacity_is_computed_and_limited_by_the_pool():
    bounds = Bounds(max_message_bytes=2**20, delivery_limit=5, capacity=2 * 2**20)
    proposed = {"max_queue_length": 10, "max_message_size": 10_000}
    assert effective_policy(proposed, bounds=bounds, now=NOW).max_queue_capacity == 100_000
    assert effective_policy({}, bounds=bounds, now=NOW).max_queue_capacity == 2 * 2**20


@given(PROPOSALS, st.integers(1024, 2**30))
def test_values_are_within_the_bounds_and_name_their_origin(proposed, largest):
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

"""The queue policy of a pool and the topology, as data."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.topology.declarations import QueueBinding, pool_topology, request_queue_arguments
from osrdyne.broker.topology.policies import pool_policies, pool_policy
from osrdyne.config.models import AuditSettings, PoolSettings, RequestSettings, Settings, WorkerSettings
from osrdyne.protocol.names import Key, PoolNames

VERSIONS = ["3.10.8", "3.11.28", "3.12.0", "3.13.7", "4.0.5", "4.2.1", "4.3.6"]
POOLS = ["a", "aa", "a_", "_a", "a_req", "req", "a_b", "b_a", "a1"]
POOL_IDS = st.sampled_from(POOLS) | st.from_regex(r"[a-z0-9_]{1,32}", fullmatch=True)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=255).filter(lambda text: len(text.encode()) <= 255)


def policy_of(
    pool: str = "p", *, version: str = "3.10.8", requests: RequestSettings | None = None
) -> dict[str, object]:
    settings = Settings(pool=PoolSettings(id=pool), requests=requests or RequestSettings())
    return dict(pool_policy(settings, BrokerVersion.parse(version)).definition)


def matches(pool: str, queue: str) -> bool:
    policy = pool_policy(Settings(pool=PoolSettings(id=pool)), BrokerVersion.parse("4.3.6"))
    return re.search(policy.pattern, queue) is not None


@given(pool=POOL_IDS, other=POOL_IDS, key=KEYS, priority=st.none() | st.integers(0, 9))
def test_policy_matches_every_key_and_priority_of_its_pool(pool, other, key, priority):
    assert matches(pool, PoolNames(pool).request_queue(Key(key), priority))
    assert matches(pool, PoolNames(other).request_queue(Key(key), priority)) is (pool == other)


@pytest.mark.parametrize("pool", POOLS)
def test_policy_leaves_the_queues_of_the_topology_and_of_others_alone(pool):
    assert not [queue.name for other in POOLS for queue in pool_topology(other).queues if matches(pool, queue.name)]
    others = ("x{}-req-a", "{}-req-a x", "{}-req-~", "X{}-req-a", "{}-reqa", "{}-req-é", "{}.req.a")
    assert not [name for name in others if matches(pool, name.format(pool))]


@pytest.mark.parametrize("version", VERSIONS)
def test_policy_keeps_dead_letters_on_every_version_and_has_the_settings_in_rabbitmqs_units(version):
    definition = policy_of(version=version)
    assert definition["dead-letter-exchange"] == "p-dl-xchg"
    assert (definition["dead-letter-strategy"], definition["overflow"]) == ("at-least-once", "reject-publish")
    assert "max-length" not in definition
    assert definition["max-length-bytes"] == 2**30
    assert "max-length-bytes" not in policy_of(version=version, requests=RequestSettings(max_length_bytes=None))
    requests = RequestSettings(ttl=1.5, delivery_limit=7, max_length=3, max_length_bytes=2**20)
    expected = {"message-ttl": 1500, "delivery-limit": 6, "max-length": 3, "max-length-bytes": 1048576}
    assert policy_of(version=version, requests=requests).items() >= expected.items()
    assert policy_of(version=version, requests=RequestSettings(ttl=0.0001))["message-ttl"] == 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.proves("requests/request-runs-longer-rabbitmq")
def test_consumer_timeout_follows_the_processing_timeout_where_rabbitmq_knows_it(version):
    settings = Settings(worker=WorkerSettings(processing_timeout=7200))
    known = version not in {"3.10.8", "3.11.28"}
    definition = pool_policy(settings, BrokerVersion.parse(version)).definition
    assert definition.get("consumer-timeout") == (7_500_000 if known else None)


def test_nothing_is_bound_routed_or_dead_lettered_before_its_place_is_declared_and_bound():
    names, order = PoolNames("p"), list[str]()
    for item in pool_topology("p").declarations:
        if isinstance(item, QueueBinding):
            assert {item.queue, item.exchange} <= set(order)
        order.append(f"bind {item.queue}" if isinstance(item, QueueBinding) else item.name)
    places = [f"bind {names.dead_letter_queue}", names.orphan_queue, f"bind {names.orphan_queue}"]
    wanted = [order.index(name) for name in [*places, names.requests_exchange]]
    assert wanted == sorted(wanted)


@pytest.mark.proves("reference-defects/5-exclusive-queues-vanished")
def test_queues_of_the_pool_lose_no_request_and_have_one_active_consumer():
    arguments = {queue.name.removeprefix("p-"): queue.arguments for queue in pool_topology("p").queues}
    for name in ("orphan", "dl", "poison", "leader"):
        assert arguments[name]["x-delivery-limit"] == 1_000_000
        assert not {"x-message-ttl", "x-max-length", "x-max-length-bytes", "x-expires"} & set(arguments[name])
    for name in ("leader", "orphan", "dl", "activity", "cancel"):
        assert arguments[name]["x-single-active-consumer"] is True


def test_request_queue_arguments_carry_the_raw_key():
    assert request_queue_arguments(PoolNames("p"), Key("é/%41"))["x-osrdyne-key"] == "é/%41"


def test_each_queue_of_the_controller_has_one_policy_of_the_pool():
    """Without one, a policy for all queues applies to it."""
    names, version = PoolNames("p_1"), BrokerVersion.parse("4.3.6")
    policies = pool_policies(Settings(pool=PoolSettings(id="p_1", kind="managed"), telemetry={"name": "log"}), version)
    declared = [queue.name for queue in pool_topology("p_1").queues]
    other = [names.register_queues(2)[0], names.snapshot_queue("circuits", 7), names.log_stream(0)]
    for queue in [*declared, *other, names.retry_queue(5000), names.request_queue(Key("a"))]:
        assert len([one for one in policies if re.search(one.pattern, queue)]) == 1, queue
    for queue in ("p_1-x", "p_1-orphan-x", "x-p_1-leader", "p_1-log-x"):
        assert not [one for one in policies if re.search(one.pattern, queue)], queue
    [audit] = [one for one in policies if one.name == names.audit_policy]
    assert audit.definition == {"max-length": 2 * AuditSettings().max_changes, "message-ttl": 30 * 86_400_000}

"""MaxDequeueRetries and MaxConcurrentReaders in the pool: a real leader in virtual time."""

import json

import pytest
from managed_pool import change, managed, managing

from osrdyne.config.models import ScalingSettings
from osrdyne.ingress.policies.manifest import load_policies
from osrdyne.pool.queues import delivery_limits
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading

POLICY = "pool-limit-a"


@pytest.fixture
def settings():
    return managed()


async def limit(stack: Stack, match: str = "a", **elements: object) -> None:
    text = json.dumps({"policies": [{"match": match, **elements}]})
    await stack.term.routing.policies.change(load_policies(text), author="me")
    await stack.clock.settle()


async def start(stack: Stack, *keys: str) -> None:
    for key in keys:
        stack.require(Key(key))
    await stack.clock.advance(1.0)


def limits(broker: FakeBroker) -> dict[str, object]:
    """The `delivery-limit` in RabbitMQ, by the name of the policy: how often a request may return."""
    return {
        name: policy.definition["delivery-limit"]
        for name, policy in broker.policies.items()
        if "delivery-limit" in policy.definition and name.startswith(("pool-req", "pool-limit-"))
    }


async def test_limit_of_a_key_lives_as_long_as_its_queue(stack, clock, broker):
    await limit(stack, MaxDequeueRetries=2)
    assert POLICY not in broker.policies
    await start(stack, "a", "b")
    assert limits(broker) == {"pool-req": 4, POLICY: 1}
    assert [broker._setting(broker.queues[f"pool-req-{key}"], "delivery-limit") for key in "ab"] == [1, 4]
    for retries, expected in [(9, 8), (1, 0), (5, None), (3, 2)]:
        await limit(stack, MaxDequeueRetries=retries)
        assert limits(broker).get(POLICY) == expected
    await stack.consume("b")
    stack.retire(Key("a"))
    await clock.advance(60.0)
    assert (stack.has_queue("a"), limits(broker)) == (False, {"pool-req": 4})


async def test_policy_of_a_key_has_all_of_the_pool_and_is_removed_by_the_next_leader(clock, broker):
    longer = {"route": "FROM /messages/* INTO $upstream", "timeToLiveSecs": 100_000}
    async with managing(clock, broker) as stack:
        await limit(stack, MaxDequeueRetries=2)
        await start(stack, "a")
        await change(stack, all=longer)
        pool, own = broker.policies["pool-req"].definition, broker.policies[POLICY].definition
        assert {**pool, "delivery-limit": 1} == own
        assert own["message-ttl"] == 100_000_000
    broker.delete_queue("pool-req-a")
    assert POLICY in broker.policies
    async with managing(clock, broker):
        await clock.advance(1.0)
        assert POLICY not in broker.policies


@pytest.mark.proves("managed/rabbitmq-s-http-api")
async def test_management_that_fails_is_asked_again_and_a_policy_that_was_deleted_comes_back(stack, clock, broker):
    await limit(stack, MaxDequeueRetries=2)
    stack.management.available = False
    await start(stack, "a")
    assert POLICY not in broker.policies
    stack.management.available = True
    await clock.advance(60.0)
    assert limits(broker)[POLICY] == 1
    del broker.policies[POLICY]
    await clock.advance(2 * delivery_limits.RELIST_INTERVAL)
    assert limits(broker)[POLICY] == 1


@pytest.mark.proves("managed/more-200-keys-delivery")
async def test_number_of_policies_is_bounded_and_shown(clock, broker, monkeypatch):
    monkeypatch.setattr(delivery_limits, "MAX_POLICIES", 2)
    async with managing(clock, broker) as stack:
        await limit(stack, "{any}", MaxDequeueRetries=2)
        await start(stack, "a", "b", "c")
        left = stack.term.queues.limits.left_out
        assert (len(limits(broker)), len(left)) == (3, 1)
        assert [stack.term.queues.limits.of(Key(key)) for key in "abc"].count(5) == 1


async def test_group_has_no_more_workers_than_readers_are_allowed(clock, broker):
    base = managed()
    scaling = ScalingSettings.model_validate({"min": 3, "max": 3})
    settings = base.model_copy(update={"worker": base.worker.model_copy(update={"scaling": scaling})})
    async with leading(clock, broker=broker, settings=settings) as stack:
        await limit(stack, MaxConcurrentReaders=2)
        await start(stack, "a")
        assert stack.running("a") == 2
        await clock.advance(30.0)
        assert stack.running("a") == 2

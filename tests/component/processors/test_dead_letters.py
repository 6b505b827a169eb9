"""The dead letter responder: a real leader on a broker in memory, in virtual time."""

import pytest
from broker_steps import hold, note, refuse
from hypothesis import given
from hypothesis import strategies as st
from managed_pool import publish_to
from replies import REPLIES, answers, died

from osrdyne.amqp import Message
from osrdyne.broker.topology.policies import MAX_RETURNS
from osrdyne.errors import PublishRefusedError
from osrdyne.processors.failures.dead_letters import last_death
from osrdyne.protocol.messages import ROUTE_HEADER
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.statuses import Status
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.stack import Stack, leading

MANY = 256
"""More dead letters than are taken at once."""


@pytest.fixture
def stack(direct):
    return direct


async def die(stack: Stack, headers: dict[str, object], **properties: object) -> None:
    """A message arrives at the dead letter exchange."""
    asked = {"reply_to": REPLIES, "correlation_id": "c", **properties}
    await publish_to(stack, stack.names.dead_letter_exchange, "a", b"1", headers=headers, **asked)
    await stack.clock.advance(5.0)


@pytest.mark.proves("reference-defects/2-dead-letters-were")
@pytest.mark.parametrize("reason", ["expired", "rejected", "maxlen"])
async def test_caller_receives_the_first_reason(stack, broker, reason):
    """defects: dead-letter-answers: another header was read, nothing acknowledged, the correlation id dropped."""
    stack.metrics.know_routes(["alerts"])
    await die(stack, {**died(reason, queue="pool-req-a_Pri3"), ROUTE_HEADER: "alerts"})
    assert (answers(broker), broker.bodies("pool-dl"), broker.bodies("pool-poison")) == ([("c", reason)], [], [])
    labels = {"reason": reason, "route": "alerts", "priority": "3"}
    assert stack.metrics.registry.get_sample_value("osrdyne_dead_letters_total", labels) == 1.0


@pytest.mark.proves("reference-defects/2-dead-letters-were")
async def test_poison_is_kept_before_the_reply_and_acknowledged_last(stack):
    steps = [("publish", "pool-poison-xchg", True), ("publish", REPLIES, True), ("ack", "pool-dl", True)]
    order = note(stack.broker, *steps)
    await die(stack, died("delivery_limit"))
    assert order == steps


@pytest.mark.proves("hostile/message-ends-terms")
async def test_request_that_every_leader_returns_is_kept_and_answered(clock, broker):
    """A message on which a leader ends came back to each later one."""
    async with leading(clock, broker=broker) as stack:
        pass
    await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c")
    for _ in range(MAX_RETURNS + 1):
        leader = FakeChannel(broker)
        await (await leader.consume("pool-orphan")).get()
        await leader.close()
    async with leading(clock, broker=broker) as stack:
        await clock.advance(5.0)
        assert answers(broker) == [("c", "delivery_limit")]
        assert (broker.bodies("pool-poison"), broker.bodies("pool-dl"), stack.orphans()) == ([b"1"], [], [])


async def test_slow_answer_does_not_hold_up_the_others(stack, broker):
    broker.declare_queue("slow", {})
    hold(broker, ("publish", "slow", False))
    for replies in ("slow", REPLIES, REPLIES):
        await die(stack, died("expired"), reply_to=replies)
    assert (len(answers(broker)), broker.bodies("slow"), len(broker.bodies("pool-dl"))) == (2, [], 1)


@pytest.mark.parametrize(
    "headers",
    [{}, died("{0}{deliveries!r:>{x}}"), died("\ud800"), died("ok"), {"x-death": [{"reason": None}]}],
    ids=["no header", "braces", "surrogate", "a status", "no reason"],
)
async def test_message_that_did_not_die_is_answered_invalid(stack, headers):
    await die(stack, headers)
    assert (answers(stack.broker), stack.broker.bodies("pool-dl"), stack.task.done()) == ([("c", "invalid")], [], False)


def deaths(*found: tuple[object, object]) -> dict[str, object]:
    return {"x-death": [{"queue": queue, "reason": reason} for queue, reason in found]}  # the latest comes first


LIMIT = "delivery_limit"
FORGED = {"x-first-death-reason": LIMIT, "x-first-death-queue": "pool-req-a", "x-last-death-reason": LIMIT}


@pytest.mark.parametrize(
    ("headers", "death"),
    [
        (deaths(("pool-req-a", "maxlen"), ("pool-req-b", "rejected")), (Status.MAXLEN, "pool-req-a")),
        # The ends of waits between attempts are no deaths.
        (deaths(("pool-retry-500", "expired"), ("pool-req-a", "rejected")), (Status.REJECTED, "pool-req-a")),
        (deaths(("pool-retry-500", "expired")), None),
        (deaths(("other-req-a", "expired"), ("pool-req-a", "rejected")), (Status.REJECTED, "pool-req-a")),
        (deaths((None, "expired"), (3, 4), ("pool-req-a", "expired")), (Status.EXPIRED, "pool-req-a")),
        # A client has sent the last entry and the other headers; the first one is RabbitMQ's.
        (FORGED | deaths(("pool-req-a", "expired"), ("pool-req-a", "delivery_limit")), (Status.EXPIRED, "pool-req-a")),
        (FORGED, None),
    ],
)
@pytest.mark.proves("hostile/client-forges-its-death")
def test_latest_death_in_a_queue_of_the_pool_counts(headers, death):
    found = last_death(headers, PoolNames("pool"))
    assert (found and found[:2]) == death


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.sampled_from(["reason", "queue", "x"]), inner)),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["x-first-death-reason", "x-death", "h"]), VALUES))
def test_hostile_headers_give_a_reason_of_ours_or_none(headers):
    death = last_death(headers, PoolNames("pool"))
    reasons = {Status.EXPIRED, Status.REJECTED, Status.MAXLEN, Status.DELIVERY_LIMIT}
    assert death is None or (death.reason in reasons and death.queue.startswith("pool-"))


@pytest.mark.proves("broker/poison-inventory-pool-poison", "reference-defects/2-dead-letters-were")
async def test_dead_letters_that_wait_for_the_inventory_hold_up_no_others(stack, broker):
    """defects: dead-letter-answers: nothing was acknowledged, so that it stopped after 200."""
    refuse(broker, PublishRefusedError("unroutable"), ("publish", "pool-poison-xchg", False))
    channel = FakeChannel(broker)
    for number in range(MANY):
        death = died("delivery_limit")
        poison = Message(headers=death, reply_to=REPLIES, correlation_id=f"p{number}")
        await channel.publish(poison, exchange=stack.names.dead_letter_exchange, routing_key="a")
    await die(stack, died("expired"))
    assert answers(broker) == [("c", "expired")]
    broker.hook = None
    await stack.clock.advance(60.0)
    assert (len(answers(broker)), len(broker.bodies("pool-poison"))) == (MANY + 1, MANY)
    assert broker.bodies("pool-dl") == []


async def test_deleted_inventory_is_declared_again_by_the_first_letter_for_it(stack, broker):
    await stack.clock.advance(1.0)
    broker.delete_queue("pool-poison")
    await die(stack, died("delivery_limit"))
    assert (answers(broker), broker.bodies("pool-poison")) == ([("c", "delivery_limit")], [b"1"])
    assert stack.metrics.registry.get_sample_value("osrdyne_topology_repairs_total", {"object": "queue"}) == 1.0

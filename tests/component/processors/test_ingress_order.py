"""The order of a key and priority level, also when a publish is tried again."""

import pytest
from broker_steps import fail_in_turn
from managed_pool import ALERTS, REST, change, waiting

from osrdyne.errors import BrokerSilentError, OsrdyneError, PublishRefusedError
from osrdyne.protocol.messages import DUPLICATE_HEADER
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack

NOT_CONFIRMED = BrokerSilentError("no confirm in time")
NOT_ROUTED = PublishRefusedError("there is no queue for it")
LONG = 600.0


def fail_publishes(broker: FakeBroker, *faults: OsrdyneError | None) -> None:
    """Make the next publishes to the default level fail."""
    fail_in_turn(broker, ("publish", "pool-work-xchg", False), *faults)


async def publish(stack: Stack, *bodies: bytes, key: str = "a", level: str = "none") -> None:
    for body in bodies:
        await stack.publish(key, body, headers={"level": level})


@pytest.mark.proves("managed/rabbitmq-take-confirm-request")
@pytest.mark.parametrize(("fault", "marked"), [(NOT_CONFIRMED, True), (NOT_ROUTED, None)], ids=["confirmed", "routed"])
async def test_request_that_is_tried_again_is_not_overtaken_and_marked_if_it_may_have_arrived(stack, fault, marked):
    await change(stack, rest=REST)
    fail_publishes(stack.broker, fault, fault)
    await publish(stack, b"1")
    await stack.clock.settle()
    await publish(stack, b"2", b"3")
    await stack.clock.advance(LONG)
    assert (waiting(stack, None), stack.orphans()) == ([b"1", b"2", b"3"], [])
    marks = [stored.message.headers.get(DUPLICATE_HEADER) for stored in stack.broker.queues["pool-req-a"].ready]
    assert marks == [marked, None, None]


async def test_requests_that_fail_together_go_again_in_their_order(stack, broker):
    await change(stack, rest=REST)
    fail_publishes(broker, NOT_CONFIRMED, NOT_ROUTED, NOT_ROUTED, NOT_ROUTED, NOT_CONFIRMED)
    await publish(stack, b"1", b"2", b"3")
    await stack.clock.settle()
    await publish(stack, b"4")
    await stack.clock.advance(LONG)
    assert waiting(stack, None) == [b"1", b"2", b"3", b"4"]


async def test_request_that_is_tried_again_holds_up_no_other_priority_level_or_key(stack):
    await change(stack, alerts=ALERTS, rest=REST)
    fail_publishes(stack.broker, NOT_CONFIRMED)
    await publish(stack, b"1")
    await stack.clock.settle()
    await publish(stack, b"2", level="alert")
    await publish(stack, b"3", key="b")
    await stack.clock.advance(1.0)
    assert (waiting(stack, None), waiting(stack, 0), waiting(stack, None, "b")) == ([], [b"2"], [b"3"])

"""What the ingress counts by route and priority level, and what a change of the routes returns about requests."""

from __future__ import annotations

from managed_pool import ALERTS, DATA, REST, change, managing, send

from osrdyne.amqp import Message
from osrdyne.pool.state.queues.backlog import Waiting
from osrdyne.protocol.messages import ROUTE_HEADER
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import Stack

RESYNC = 60.0


def counted(stack: Stack, outcome: str, route: str = "", priority: str = "") -> float | None:
    labels = {"outcome": outcome, "route": route, "priority": priority}
    return stack.metrics.registry.get_sample_value("osrdyne_ingress_total", labels)


async def publish(stack: Stack, *levels: str, key: str = "a") -> None:
    for level in levels:
        await stack.publish(key, headers={"level": level})
    await stack.clock.settle()


async def test_time_to_forward_includes_the_wait_for_the_queue(stack: Stack, broker: FakeBroker) -> None:
    async def bind_slowly(command: Command) -> None:
        if command == ("bind", "pool-req-a", False):
            await stack.clock.sleep(5.0)

    await change(stack, rest=REST)
    broker.hook = bind_slowly
    await publish(stack, "none")
    await stack.clock.advance(10.0)
    assert stack.metrics.registry.get_sample_value("osrdyne_forward_seconds_sum") == 5.0


async def test_refused_request_is_counted_by_its_route_once_that_is_known(
    clock: VirtualClock, broker: FakeBroker
) -> None:
    broker.declare_queue("pool-req-a", {"x-queue-type": "classic"})
    async with managing(clock, broker, alerts=ALERTS) as stack:
        await publish(stack, "alert", "none")
        await clock.advance(1.0)
        assert (counted(stack, "start-failed", "alerts", "0"), counted(stack, "no-route")) == (1.0, 1.0)


async def test_condition_beyond_its_work_limit_takes_no_request_and_is_counted(stack: Stack) -> None:
    costly = " OR ".join(f"contains(word, 'y{number}')" for number in range(400))
    routes = {"costly": f"FROM /messages/* WHERE {costly} INTO $upstream", "rest": REST}
    await change(stack, **routes)
    await send(stack, "a", headers={"word": "x" * 2**20})
    assert stack.metrics.registry.get_sample_value("osrdyne_conditions_limited_total") == 1.0
    assert counted(stack, "accepted", "rest", "default") == 1.0


async def test_name_of_an_unknown_route_is_not_a_label(stack: Stack, clock: VirtualClock, broker: FakeBroker) -> None:
    await change(stack, rest=REST)
    made_up = Message(headers={ROUTE_HEADER: "made up"})
    await FakeChannel(broker).publish(made_up, exchange="pool-work-xchg", routing_key="a")
    await clock.settle()
    assert counted(stack, "accepted", "other", "default") == 1.0


async def test_backlog_of_priority_levels_is_known_after_each_listing(stack: Stack, clock: VirtualClock) -> None:
    await change(stack, alerts=ALERTS, rest=REST)
    await publish(stack, "alert")
    first = clock.monotonic()
    await clock.advance(10.0)
    await publish(stack, "alert", "none", "none", key="b")
    second = clock.monotonic()
    await clock.advance(RESYNC)
    assert stack.backlog() == {0: Waiting(2, first), None: Waiting(2, second)}


async def test_change_tells_how_many_requests_of_unused_priorities_wait(stack: Stack) -> None:
    await change(stack, alerts=ALERTS, data=DATA, rest=REST)
    await publish(stack, "alert", "alert", "data", "none")
    await publish(stack, "alert", key="b")
    done = await change(stack, data=DATA, rest=REST)
    assert (done.removed, done.pending) == ((0,), {0: 3})

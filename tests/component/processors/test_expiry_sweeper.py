"""The expiry sweeper: a real leader of a managed pool on a broker in memory, in virtual time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count

import pytest
from broker_steps import kill_within, refuse
from managed_pool import change, managed, publish_to, send
from replies import REPLIES, answers, broker_with_replies
from test_retry_queues import PLAIN, fail, time_out

from osrdyne.config.models import RequestSettings
from osrdyne.errors import BrokerSilentError, MessageTooLargeError
from osrdyne.pool.routing.retries import POLL_INTERVAL
from osrdyne.processors.expiry import sweeper
from osrdyne.protocol.activity import COMPLETED_ROUTE_HEADER, ActivityReport, Event
from osrdyne.protocol.messages import DUPLICATE_HEADER, FAILED_DELIVERIES_HEADER, STATUS_HEADER
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading

SHORT, LONG = "20000", "500000"
"""Lifetimes in milliseconds."""
QUEUE = "pool-req-k"
CLEANED = 60.0
"""Seconds by which the short ones have expired, and the queue was swept."""


@asynccontextmanager
async def managing(clock: VirtualClock, broker: FakeBroker, **settings: object) -> AsyncIterator[Stack]:
    requests = RequestSettings(check_entire_queue_on_cleanup=True, **settings)  # type: ignore[arg-type]
    cleaning = managed().model_copy(update={"requests": requests})
    async with leading(clock, broker=broker, settings=cleaning) as stack:
        yield stack


@pytest.fixture
async def stack(clock, broker):
    async with managing(clock, broker) as stack:
        yield stack


async def publish(stack: Stack, *requests: str, key: str = "k", **headers: object) -> None:
    """Publish requests by name; those that begin with `x` expire soon."""
    for name in requests:
        asked = {"expiration": SHORT if name.startswith("x") else LONG, "correlation_id": name, "reply_to": REPLIES}
        await send(stack, key, name.encode(), headers=headers, **asked)


def waiting(stack: Stack, key: str = "k") -> list[str]:
    return [body.decode() for body in stack.waiting(key)]


async def reject_first(stack: Stack) -> None:
    """A worker fails on the first request, and ends."""
    channel = FakeChannel(stack.broker)
    delivery = await channel.get(QUEUE)
    assert delivery is not None
    await delivery.reject()
    await channel.close()


async def test_expired_requests_are_removed_in_time_without_a_listing(clock, broker):
    """The counts of a listing are some seconds old; a passive declare of the queue returns the current one."""
    async with managing(clock, broker, cleanup_interval=2.0) as stack:

        async def fail_listing(command):
            if command.name == "list_queues":
                raise BrokerSilentError("no answer")

        broker.hook = fail_listing
        await publish(stack, "1", "x1", "2", "x2", "3")
        await publish(stack, "1", "x3", "2", key="other")
        await clock.advance(22.0)  # 20 s and the interval
        assert (waiting(stack), waiting(stack, "other")) == (["1", "2", "3"], ["1", "2"])
        assert sorted(answers(broker)) == [("x1", "expired"), ("x2", "expired"), ("x3", "expired")]


async def test_request_keeps_its_deadline_however_often_its_queue_is_swept(stack, clock):
    sent = datetime.fromtimestamp(clock.time(), tz=UTC)
    await stack.publish("k", b"1", expiration=LONG, timestamp=sent, reply_to=REPLIES)
    for expiring in ("x1", "x2", "x3", "x4", "x5"):
        await publish(stack, expiring)
        await clock.advance(CLEANED)
    assert waiting(stack) == ["1"]


async def test_request_that_a_worker_holds_stays_with_it(stack, clock):
    await publish(stack, "1", "2", "x1", "3")
    consumer = await stack.consume("k")
    held = await consumer.get()
    await clock.advance(CLEANED)
    await held.ack()
    following = [await consumer.get()]
    await following[0].ack()
    following.append(await consumer.get())
    assert [held.body, *(one.body for one in following)] == [b"1", b"2", b"3"]


async def test_request_that_comes_meanwhile_goes_behind_all_others(stack, broker):
    late: list[str] = []

    async def arrive(command):
        if command.name in {"consume", "cancel"} and command.target == QUEUE:
            late.append(f"late {len(late)}")
            await stack.publish("k", late[-1].encode(), expiration=LONG)

    await publish(stack, "1", "x1", "2", "3")
    broker.hook = arrive
    await stack.clock.advance(CLEANED)
    assert waiting(stack) == ["1", "2", "3", *late]
    assert len(late) == 4


@pytest.mark.proves("requests/channel-closes-soon-many")
async def test_copies_are_marked_carry_failed_deliveries_and_are_acknowledged_in_one_step(stack):
    """RabbitMQ drops acknowledgements that it has not processed when the channel closes."""
    await publish(stack, "1", "x1", *"234567")
    await reject_first(stack)
    await stack.clock.advance(CLEANED)
    assert (waiting(stack), stack.broker.count("ack", QUEUE)) == ([*"1234567"], 1)
    headers = [stored.message.headers for stored in stack.broker.queues[QUEUE].ready]
    assert [one.get(FAILED_DELIVERIES_HEADER) for one in headers] == [1] + [None] * 6
    assert all(one[DUPLICATE_HEADER] is True for one in headers)


async def test_request_that_failed_too_often_in_all_becomes_poison(clock, broker):
    async with managing(clock, broker, delivery_limit=4) as stack:
        for round_ in range(2):
            await publish(stack, *(["1"] if not round_ else []), f"x{round_}", "2")
            await reject_first(stack)
            await reject_first(stack)
            await clock.advance(CLEANED)
        await clock.advance(CLEANED)
        assert ("1", "delivery_limit") in answers(broker)
        assert "1" not in waiting(stack)


async def test_each_priority_level_is_swept_by_itself(stack, clock, broker):
    high = {"route": "FROM /* WHERE level = 'high' INTO $upstream", "priority": 2}
    await change(stack, high=high, rest="FROM /* INTO $upstream")
    await publish(stack, "1", "x1", "2")
    await publish(stack, "h1", "xh", "h2", level="high")
    await clock.advance(CLEANED)
    assert (waiting(stack), broker.bodies(f"{QUEUE}_Pri2")) == (["1", "2"], [b"h1", b"h2"])


@pytest.mark.parametrize("error", [BrokerSilentError("no confirm"), MessageTooLargeError("too large")], ids=repr)
async def test_ingress_goes_on_when_a_copy_is_not_taken(stack, broker, error):
    """The mark makes the headers larger than RabbitMQ takes, where they were as large as it takes."""
    await publish(stack, "1", "x1", "2")
    refuse(broker, error, ("publish", stack.names.work_exchange(None), False))
    await stack.clock.advance(CLEANED)
    broker.hook = None
    consumed = broker.count("consume", QUEUE)
    await publish(stack, "3")
    assert ([body for body in waiting(stack) if body != "x1"], consumed) == (["1", "2", "3"], 1)
    assert not stack.task.done()


async def test_queue_without_a_leader_is_not_taken_for_swept(stack, broker):

    async def lose_leader(command):
        if command == Command("consume", QUEUE, done=True):
            broker.set_running(QUEUE, False)

    await publish(stack, "1", "x1", "2")
    broker.hook = lose_leader
    await stack.clock.advance(32.0)
    cancelled = broker.count("cancel", QUEUE)
    broker.set_running(QUEUE, True)
    await stack.clock.advance(CLEANED)
    assert (cancelled, waiting(stack)) == (0, ["1", "2"])


async def test_queue_that_is_too_long_is_left_alone(stack, monkeypatch):
    monkeypatch.setattr(sweeper, "MAX_TAKEN", 2)
    await publish(stack, "1", "x1", "2")
    await stack.clock.advance(CLEANED)
    assert waiting(stack) == ["1", "x1", "2"]


async def test_queue_that_holds_too_much_gets_everything_back(stack, monkeypatch):
    monkeypatch.setattr(sweeper, "MAX_TAKEN_BYTES", 3)
    await publish(stack, "1", "x1", "2")
    await stack.clock.advance(5 * CLEANED)
    assert [one.returns for one in stack.broker.queues[QUEUE].ready] == [sweeper.MAX_FAILURES] * 3


# --- The leader is killed after every step of a sweep


@pytest.mark.proves("managed/leader-dies-sweeps-queue")
@pytest.mark.parametrize("busy", [False, True], ids=["no worker", "worker"])
async def test_nothing_is_lost_and_nothing_overtakes(busy):
    killed, number = True, 0
    while killed:
        number += 1
        clock = VirtualClock()
        broker = broker_with_replies(clock)
        killed, served = await story(clock, broker, number, busy=busy)
        firsts = list(dict.fromkeys(body.decode() for body, _ in served))
        again = [marked for place, (body, marked) in enumerate(served) if body in [one for one, _ in served[:place]]]
        assert [name for name in firsts if not name.startswith("x")] == ["1", "2", "3", "4"], number
        assert all(again), number
        expired = {name for name, status in answers(broker) if status == "expired"}
        assert expired | set(firsts) == {"1", "2", "3", "4", "x1", "x2"}, number
    assert number > 12  # steps


async def story(
    clock: VirtualClock, broker: FakeBroker, number: int, *, busy: bool
) -> tuple[bool, list[tuple[bytes, bool]]]:
    """Whether there was such a step; and what a worker received, with the mark of a possible duplicate."""
    steps = count(1)
    served: list[tuple[bytes, bool]] = []
    async with managing(clock, broker) as stack:
        await publish(stack, "1", "x1", "2", "3", "x2", "4")
        await clock.advance(29.0)  # the next look is at 30

        async def strike(command: Command) -> None:
            if busy and command.name == "publish" and command.done:
                await serve_one(stack, served)
            if command.done and next(steps) == number:
                kill_within(stack)

        broker.hook = strike
        await clock.advance(2.0)
        broker.hook = None
        there_was = stack.killed
        await stack.kill()
    async with managing(clock, broker) as stack:
        if not busy:
            await clock.advance(CLEANED)
        while stack.broker.queues[QUEUE].ready:
            await serve_one(stack, served)
        await clock.settle()
    return there_was, served


async def serve_one(stack: Stack, served: list[tuple[bytes, bool]]) -> None:
    """A worker takes one request, if there is one."""
    channel = FakeChannel(stack.broker)
    hook, stack.broker.hook = stack.broker.hook, None
    delivery = await channel.get(QUEUE)
    if delivery is not None:
        marked = delivery.redelivered or delivery.headers.get(DUPLICATE_HEADER) is True
        served.append((delivery.body, marked))
        await delivery.ack()
    stack.broker.hook = hook


# --- RabbitMQ itself returns requests from a wait for another attempt to their QUEUE, and no component notes it


async def allow_retries(stack: Stack) -> None:
    await change(stack, plain=PLAIN)
    await stack.clock.advance(3 * POLL_INTERVAL)  # by then it is known that nothing waits since before


async def come_back(stack: Stack, name: str = "x1", *, is_reported: bool = True) -> None:
    """It is tried and waits for a second; then it is behind two others."""
    await publish(stack, name)
    await fail(stack, "k")
    if is_reported:
        details = {STATUS_HEADER: bytearray(b"retried"), COMPLETED_ROUTE_HEADER: "plain"}
        report = ActivityReport("k", Event.REQUEST_COMPLETED, "w", {}, details)
        exchange = stack.names.activity_exchange
        await publish_to(stack, exchange, "k", report.wire_body(), headers=report.wire_headers())
    await publish(stack, "1", "2")
    await time_out(stack)


async def test_queue_is_not_read_where_nothing_was_tried_again(stack, broker):
    await allow_retries(stack)
    await publish(stack, "1", "2", "3")
    await stack.clock.advance(8 * CLEANED / 2)
    assert broker.count("consume", QUEUE) == 0


async def test_queue_is_read_in_time_while_something_can_come_back(stack, broker):
    await allow_retries(stack)
    await come_back(stack)
    assert waiting(stack) == ["1", "2", "x1"]
    await stack.clock.advance(CLEANED)
    assert (waiting(stack), answers(broker)) == (["1", "2"], [("x1", "expired")])
    await stack.clock.advance(CLEANED)
    count = broker.count("consume", QUEUE)
    await stack.clock.advance(2 * CLEANED)
    assert broker.count("consume", QUEUE) == count > 0


async def test_request_that_came_back_unreported_is_found_later(stack, broker):
    await allow_retries(stack)
    await come_back(stack, is_reported=False)
    await stack.clock.advance(CLEANED)
    assert answers(broker) == []
    await stack.clock.advance(sweeper.SWEEP_AGAIN * CLEANED / 2)
    assert answers(broker) == [("x1", "expired")]


async def test_new_leader_reads_what_may_have_come_back(clock, broker):
    async with managing(clock, broker) as stack:
        await allow_retries(stack)
        await publish(stack, "x1")
        await fail(stack, "k")
    async with managing(clock, broker) as stack:
        await publish(stack, "1", "2")
        await time_out(stack)
        await clock.advance(CLEANED)
        assert (waiting(stack), answers(broker)) == (["1", "2"], [("x1", "expired")])

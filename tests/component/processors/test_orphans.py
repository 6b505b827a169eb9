"""The forwarder of a direct pool: a real leader on a broker in memory, in virtual time."""

import asyncio
from datetime import UTC, datetime

import pytest
from broker_steps import hold, kill_within, refuse
from managed_pool import publish_to, send
from replies import REPLIES, answers, died

from osrdyne.amqp import Delivery, Message
from osrdyne.amqp.direct_reply_to import PUBLISH_ATTEMPTS, REFUSED, UNTIL_NO_DEADLINE
from osrdyne.config.models import Settings
from osrdyne.errors import BrokerAccessError, QueueFullError
from osrdyne.ingress.requests import Arrival
from osrdyne.processors.requests.forwarding import MAX_HOPS, Orphan, direct_message
from osrdyne.protocol.deadlines import DEADLINE_HEADER, MAX_EXPIRATION_MS
from osrdyne.protocol.messages import AUTHORIZATION_HEADER, BROKER_HEADERS, HOPS_HEADER, NO_ACTIVATE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading, settings_for

A = Key("a")
NOW_MS = 1_700_000_000_000


@pytest.fixture
def stack(direct):
    return direct


def taking_at_most(monkeypatch: pytest.MonkeyPatch, held: int, each: int) -> Settings:
    """Settings of a leader that holds so many bytes at once, and expects so many of each request."""
    monkeypatch.setattr("osrdyne.processors.prefetch.MAX_HELD_BYTES", held)
    settings = settings_for()
    return settings.model_copy(update={"requests": settings.requests.model_copy(update={"max_message_bytes": each})})


@pytest.mark.proves("controller/many-large-requests-keys")
@pytest.mark.parametrize("small", [0, 1, 100])
async def test_memory_limits_what_waits(clock, monkeypatch, small):
    """Never more bytes than the limit, also while they are being taken, with small requests before large ones."""
    never, most = asyncio.Event(), 0

    def held(stack):
        holders = stack.broker.queues[stack.names.orphan_queue].holders
        return sum(len(stored.message.body) for holder in holders for stored in holder.held.values())

    async def hang(command):
        nonlocal most
        most = max(most, held(stack))
        if command == ("bind", "pool-req-slow", False):
            await never.wait()

    async with leading(clock, settings=taking_at_most(monkeypatch, 10 * 1024, each=1024)) as stack:
        stack.broker.hook = hang
        for size in [10] * small + [1024] * 100:
            await stack.publish("slow", b"x" * size)
        await clock.advance(60.0)
        # What fits, and no less than that without one of the largest.
        assert 9 * 1024 < max(most, held(stack)) <= 10 * 1024


async def test_larger_requests_lower_the_prefetch(clock, monkeypatch):
    """RabbitMQ takes messages of more than `requests.max_message_bytes` from other clients, up to its own limit."""
    async with leading(clock, settings=taking_at_most(monkeypatch, 20 * 1024, each=10 * 1024)) as stack:
        hold(stack.broker, ("bind", "pool-req-slow", False))
        for _ in range(20):
            await stack.publish("slow", b"x" * 100 * 1024)
        await clock.advance(60.0)
        taken = sum(len(holder.held) for holder in stack.broker.queues[stack.names.orphan_queue].holders)
        assert taken <= 3


@pytest.mark.proves("races/queue-expires-forwarder-waits")
@pytest.mark.parametrize(
    "step", [("bind", "pool-req-a", False), ("publish", "pool-req-xchg", False)], ids=["bind", "publish"]
)
async def test_orphan_pins_its_group_until_it_is_forwarded(stack, step):
    """lifecycle: pin-until-forwarded [nopin]: the idle timer must not fire before the bind, nor the group be unbound
    while its request is published."""
    await stack.publish("a", b"1", headers={DEADLINE_HEADER: round((stack.clock.time() + 20_000.0) * 1000)})
    allowed = hold(stack.broker, step)
    await stack.clock.advance(10_000.0)
    assert (stack.is_bound("a"), stack.is_held(A)) == (step[0] == "publish", True)
    allowed.set()
    await stack.clock.settle()
    assert (stack.waiting("a"), stack.is_held(A)) == ([b"1"], False)


@pytest.mark.proves("races/queue-expires-forwarder-waits")
async def test_orphan_whose_queue_was_unbound_meanwhile_becomes_an_orphan_again(stack):
    async def unbind_once(command):
        if command == ("publish", "pool-req-xchg", False) and stack.is_bound("a"):
            stack.broker.hook = None
            stack.broker.unbind("pool-req-a", "pool-req-xchg", "a")
            stack.set_queue(A, binding="unknown")
            stack.term.queues.loop.reconcile(A)

    stack.broker.hook = unbind_once
    await send(stack, "a", b"1")
    assert (stack.waiting("a"), stack.orphans()) == ([b"1"], [])


@pytest.mark.proves("reference-defects/5-exclusive-queues-vanished", "reference-defects/15-confirms-prefetch-back")
@pytest.mark.proves("controller/leader-dies-forwarded-request")
@pytest.mark.parametrize(("done", "forwarded"), [(False, []), (True, [b"1"])], ids=["before", "after"])
async def test_crash_around_the_forward_leaves_the_orphan_to_the_next_leader(clock, broker, done, forwarded):
    """lifecycle: ack-after-confirm [ackfirst]: a duplicate is allowed, a loss is not."""
    with pytest.raises(BaseExceptionGroup):
        async with leading(clock, broker=broker) as stack:

            async def cut(command):
                if command == ("publish", "pool-req-xchg", done) and stack.is_bound("a"):
                    for connection in stack.connections:
                        connection.cut()

            broker.hook = cut
            await send(stack, "a", b"1")
    broker.hook = None
    assert (broker.bodies("pool-orphan"), broker.bodies("pool-req-a")) == ([b"1"], forwarded)
    async with leading(clock, broker=broker) as stack:
        await clock.settle()
        assert (stack.waiting("a"), stack.orphans()) == ([*forwarded, b"1"], [])


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        ("\udcff", {}, "invalid"),
        ("a", {DEADLINE_HEADER: NOW_MS - 6_000}, "expired"),
        ("a", {NO_ACTIVATE_HEADER: True}, "not-running"),
        ("a", {HOPS_HEADER: MAX_HOPS}, "rejected"),
    ],
    ids=["key that is not UTF-8", "expired", "group that is not up", "in circles"],
)
@pytest.mark.proves("requests/routing-key-utf-8")
async def test_orphan_that_is_refused_is_answered_and_starts_no_worker(stack, key, headers, status):
    await send(stack, key, b"1", reply_to=REPLIES, correlation_id="c", headers=headers)
    assert (answers(stack.broker), stack.orphans()) == ([("c", status)], [])
    assert (stack.groups(), stack.driver.calls) == ([], [])


@pytest.mark.proves("hostile/request-with-a-history")
@pytest.mark.parametrize(
    "headers",
    [
        {"x-death": [{"queue": "delays", "reason": "expired"}], "x-first-death-reason": "expired"},
        {"x-delivery-count": 99, "x-acquired-count": 99, "x-shovelled": [{"src-queue": "delays"}]},
        {"x-received-from": [{"exchange": "up"}], "x-opt-deaths": []},
    ],
    ids=["delayed", "shovelled", "federated"],
)
async def test_request_with_a_history_is_served(stack, headers):
    await stack.publish("a", b"1", headers=headers)
    await stack.clock.settle()
    delivery = await stack.take("a")
    assert (delivery.body, BROKER_HEADERS & {*delivery.headers}) == (b"1", set())
    assert {*headers} - BROKER_HEADERS <= {*delivery.headers}


async def test_request_is_forwarded_within_the_allowed_skew_and_while_its_group_is_on_its_way(stack):
    await send(stack, "a", b"1", headers={"x-deadline": NOW_MS - 4_000})
    await send(stack, "a", b"2", headers={NO_ACTIVATE_HEADER: True})
    assert stack.waiting("a") == [b"1", b"2"]


async def test_foreign_queue_is_answered_and_leaves_other_keys_alone(stack, broker):
    broker.declare_queue("pool-req-a", {"x-queue-type": "classic"})
    for _ in range(3):
        await stack.publish("a", reply_to=REPLIES)
    await send(stack, "b", b"1")
    assert (answers(broker), stack.waiting("b")) == ([(None, "start-failed")] * 3, [b"1"])


@pytest.mark.proves("requests/reply-queue-full")
async def test_reply_queue_that_is_gone_or_refuses_does_not_keep_the_orphan(stack, clock):
    refuse(stack.broker, QueueFullError("nack"), ("publish", "refuses", False))
    for reply_to in ("gone", "refuses"):
        await stack.publish("\udcff", reply_to=reply_to)
    await clock.advance(UNTIL_NO_DEADLINE + 5.0)
    assert (stack.orphans(), stack.task.done()) == ([], False)
    assert stack.metrics.registry.get_sample_value("osrdyne_replies_failed_total") == 1.0


@pytest.mark.proves("requests/reply-queue-full")
async def test_answer_to_a_full_reply_queue_is_tried_again_as_a_worker_does(stack, clock):
    refuse(stack.broker, QueueFullError("nack"), ("publish", REPLIES, False), times=PUBLISH_ATTEMPTS - 1)
    await send(stack, "\udcff", reply_to=REPLIES, correlation_id="c")
    assert (answers(stack.broker), stack.orphans()) == ([], [b""])
    await clock.advance(5.0)
    assert (answers(stack.broker), stack.orphans()) == ([("c", "invalid")], [])
    assert stack.metrics.registry.get_sample_value("osrdyne_replies_failed_total") == 0.0


@pytest.mark.parametrize("error", [QueueFullError("nack"), BrokerAccessError("refused")], ids=["full", "no permission"])
@pytest.mark.proves("requests/reply-queue-full")
async def test_answer_waits_for_its_queue_and_holds_up_nothing(stack, clock, error):
    """Until the deadline; requests of the same key go on, dead letters and other callers too. `status` shows it."""
    is_refused, broker = True, stack.broker
    broker.declare_queue("other", {})
    refuse(broker, error, ("publish", REPLIES, False), when=lambda: is_refused)
    late = {DEADLINE_HEADER: (clock.time() + 20.0) * 1000}
    for number, headers in enumerate([late, {}, {}]):
        properties = {"reply_to": REPLIES, "correlation_id": str(number)}
        await stack.publish("a", headers={NO_ACTIVATE_HEADER: True, **headers}, **properties)
    dead = {"reply_to": REPLIES, "correlation_id": "dead", "headers": died("rejected")}
    await publish_to(stack, stack.names.dead_letter_exchange, "a", **dead)
    await clock.advance(3.0)
    finding = stack.term.processors.replier.finding({})
    assert finding is not None
    assert (finding.ok, finding.fatal, "4" in finding.message) == (False, False, True)
    await stack.publish("a", b"1")
    await stack.publish("b", reply_to="other", headers={NO_ACTIVATE_HEADER: True})
    await clock.advance(3.0)
    assert (stack.waiting("a"), len(broker.bodies("other")), stack.orphans()) == ([b"1"], 1, [b""] * 3)
    await clock.advance(30.0)
    assert (len(stack.orphans()), stack.task.done()) == (2, False)
    is_refused = False
    await clock.advance(REFUSED.maximum * (1 + REFUSED.jitter))  # the longest pause between two attempts
    assert sorted(name for name, _ in answers(broker)) == ["1", "2", "dead"]
    assert (stack.orphans(), broker.bodies("pool-dl"), stack.term.processors.replier.finding({})) == ([], [], None)


@pytest.mark.parametrize("end", ["stopped", "killed"])
@pytest.mark.proves("requests/reply-queue-full")
async def test_next_leader_sends_the_answers_that_waited(clock, broker, end):
    broker.declare_queue(REPLIES, {})
    refuse(broker, QueueFullError("nack"), ("publish", REPLIES, False))
    async with leading(clock, broker=broker) as stack:
        for number in range(3):
            await stack.publish("\udcff", reply_to=REPLIES, correlation_id=str(number))
        await clock.advance(5.0)
        if end == "killed":
            kill_within(stack)
        else:
            stack.stop.requested.set()
            await clock.advance(5.0)
            assert stack.task.done()
    broker.hook = None
    async with leading(clock, broker=broker) as stack:
        await clock.advance(1.0)
        assert sorted(answers(broker)) == [(str(number), "invalid") for number in range(3)]


async def test_answers_beyond_the_limit_are_dropped_soon(stack, clock, monkeypatch):
    monkeypatch.setattr("osrdyne.processors.replies.MAX_WAITING_OF_QUEUE", 2)
    refuse(stack.broker, QueueFullError("nack"), ("publish", REPLIES, False))
    for _ in range(5):
        await stack.publish("\udcff", reply_to=REPLIES)
    await clock.advance(10.0)
    assert len(stack.orphans()) == 2
    assert stack.metrics.registry.get_sample_value("osrdyne_replies_failed_total") == 3.0


async def test_stop_finishes_what_was_taken_and_leaves_the_rest(stack, broker):
    """A graceful end: consumers first, then what they have taken, then the loops; workers go on."""
    allowed = hold(broker, ("bind", "pool-req-a", False))
    await send(stack, "a", b"taken")
    stack.stop.requested.set()
    await stack.clock.settle()
    await stack.publish("b", b"late")
    allowed.set()
    await asyncio.wait({stack.task})
    assert (stack.waiting("a"), stack.orphans(), stack.running("a")) == ([b"taken"], [b"late"], 1)


def forwarded(sent: Message, *, now_ms: int) -> Message:
    """What is sent on of an orphan, of whichever user."""
    delivery = Delivery(FakeChannel(FakeBroker(VirtualClock())), 1, "x", "a", False, b"", sent.properties())
    delivery.properties.user_id = "stranger"
    arrival = Arrival(delivery.to_request(now_ms=now_ms), accepted_ms=now_ms)
    return direct_message(Orphan(delivery, arrival, 0.0), now_ms=now_ms)


@pytest.mark.proves("reference-defects/16-user-id-closed")
def test_deadline_is_the_same_however_late_and_often_a_request_is_passed_on():
    """defects: user-id: per-message expiration started anew at every hop, and a foreign user id closed the channel."""
    secrets = ["Authorization", AUTHORIZATION_HEADER, "CC", "BCC", "x-death", "x-delivery-count", "x-acquired-count"]
    headers = {**dict.fromkeys(secrets, "v"), "traceparent": "t", HOPS_HEADER: 3}
    sent = Message(expiration="60000", timestamp=datetime.fromtimestamp(NOW_MS / 1000, UTC), headers=headers)
    for late in (10_000, 20_000, 40_000):
        sent = forwarded(sent, now_ms=NOW_MS + late)
    assert dict(sent.headers) == {"x-deadline": NOW_MS + 60_000, "traceparent": "t", HOPS_HEADER: 6}
    assert (sent.expiration, sent.properties().user_id) == ("20000", None)


def test_deadline_further_away_than_an_expiration_may_be_costs_no_connection():
    message = forwarded(Message(headers={"x-deadline": NOW_MS * 100}), now_ms=NOW_MS)
    assert message.expiration == str(MAX_EXPIRATION_MS)


def repairs(stack: Stack, kind: str) -> float:
    return stack.metrics.registry.get_sample_value("osrdyne_topology_repairs_total", {"object": kind}) or 0.0


# --- A request that was forwarded and comes back shows that its queue, or the binding, is gone


@pytest.mark.proves("broker/request-queue-binding-deleted")
async def test_deleted_queue_of_a_returned_request_is_declared_again_at_once(stack, clock):
    stack.require(A)
    await clock.advance(1.0)
    stack.broker.delete_queue("pool-req-a")
    bodies = [b"%d" % number for number in range(300)]
    for body in bodies:
        await stack.publish("a", body)
    await clock.settle()
    assert (sorted(stack.waiting("a")), stack.orphans()) == (sorted(bodies), [])
    assert repairs(stack, "request_queue") == 1.0


@pytest.mark.proves("broker/request-queue-binding-deleted")
@pytest.mark.parametrize("can_look_up", [True, False])
async def test_removed_binding_of_a_returned_request_is_bound_again_at_once(stack, can_look_up):
    stack.require(A)
    await stack.clock.advance(1.0)
    stack.broker.unbind("pool-req-a", stack.names.requests_exchange, "a")
    stack.management.available = can_look_up
    await send(stack, "a", b"1")
    assert (stack.waiting("a"), stack.task.done()) == ([b"1"], False)
    assert stack.broker.count("declare", "pool-req-a") == 1
    assert repairs(stack, "request_binding") == (1.0 if can_look_up else 0.0)


async def test_returned_request_whose_queue_is_intact_is_forwarded_after_one_check(stack):
    stack.require(A)
    await stack.clock.advance(1.0)
    looked_up = stack.broker.count("look_up", "pool-req-a")
    channel = FakeChannel(stack.broker)
    for _ in range(100):
        returned = Message(body=b"1", headers={HOPS_HEADER: 1})
        await channel.publish(returned, exchange=stack.names.orphan_exchange, routing_key="a")
    await stack.clock.settle()
    assert len(stack.waiting("a")) == 100
    assert stack.broker.count("look_up", "pool-req-a") == looked_up + 1
    assert stack.broker.count("bind", "pool-req-a") == 1
    assert repairs(stack, "request_queue") == repairs(stack, "request_binding") == 0.0

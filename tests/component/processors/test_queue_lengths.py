"""MaxQueueLength, EnqueueTimeout and Overflow: a real leader on a broker in memory, in virtual time."""

import asyncio
import json

import managed_pool
import pytest
from broker_steps import hold, refuse
from managed_pool import ALERTS, COPY, REST, TO_B, change, managing, waiting
from replies import REPLIES, answers

from osrdyne.errors import BrokerAccessError, BrokerUnavailableError, QueueFullError
from osrdyne.ingress.policies.manifest import load_policies
from osrdyne.processors import consumers
from osrdyne.processors.requests import lengths
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack

LIMIT = 5
TOTAL = 40
LEVELS = ("default", "")
"""The labels of the default level, once a request has a route and before."""


async def limit(stack: Stack, match: str = "a", **elements: object) -> None:
    document = {"policies": [{"match": match, "MaxQueueLength": LIMIT, **elements}]}
    await stack.term.routing.policies.change(load_policies(json.dumps(document)), author="me")


async def ask(stack: Stack, *numbers: int, key: str = "a", **properties: object) -> None:
    for number in numbers:
        await stack.publish(key, b"%d" % number, reply_to=REPLIES, correlation_id=f"{number}", **properties)


async def cancel(stack: Stack, number: int, *, key: str = "a", reply_to: str = REPLIES) -> None:
    await managed_pool.cancel(stack, key, correlation_id=f"{number}", reply_to=reply_to)


async def serve_one(stack: Stack) -> None:
    """A worker takes one request, if there is one."""
    taken = await FakeChannel(stack.broker).get("pool-req-a")
    if taken is not None:
        await taken.ack()


def bodies(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def statuses(broker: FakeBroker) -> dict[str | None, str | None]:
    found = answers(broker)
    assert len(dict(found)) == len(found), "a caller was answered twice"
    return dict(found)


def value(stack: Stack, name: str, **labels: str) -> float:
    return stack.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize("timeout", [0, 10])
@pytest.mark.parametrize(
    ("overflow", "status"),
    [("RejectIncomingMessage", "queue-full"), ("DiscardIncomingMessage", "ok"), ("DiscardExistingMessage", "maxlen")],
)
async def test_request_beyond_the_length_is_answered(stack, broker, timeout, overflow, status):
    await limit(stack, EnqueueTimeout=timeout, Overflow=overflow)
    await ask(stack, *range(TOTAL))
    await stack.clock.advance(timeout + 5.0)
    kept = range(TOTAL - LIMIT, TOTAL) if status == "maxlen" else range(LIMIT)
    assert waiting(stack, None) == bodies(*kept)
    assert statuses(broker) == {f"{number}": status for number in range(TOTAL) if number not in kept}
    assert (stack.orphans(), value(stack, "osrdyne_enqueue_waiting")) == ([], 0)
    assert value(stack, "osrdyne_evicted_total") == (TOTAL - LIMIT if status == "maxlen" else 0)
    counted = [value(stack, "osrdyne_ingress_total", outcome="discarded", route="", priority=one) for one in LEVELS]
    assert sum(counted) == (TOTAL - LIMIT if status == "ok" else 0)
    message = broker.queues[REPLIES].ready[0].message
    if status == "ok":
        assert (message.headers["x-code"], [*json.loads(message.body)]) == (202, ["discarded"])


async def test_request_takes_the_room_that_a_worker_makes_in_time(stack, broker):
    await limit(stack, EnqueueTimeout=30)
    await ask(stack, *range(LIMIT + 2))
    await stack.clock.advance(5.0)
    assert (waiting(stack, None), answers(broker)) == (bodies(*range(LIMIT)), [])
    await serve_one(stack)
    await stack.clock.advance(2.0)
    assert waiting(stack, None) == bodies(*range(1, LIMIT + 1))
    await stack.clock.advance(30.0)
    assert statuses(broker) == {f"{LIMIT + 1}": "queue-full"}


@pytest.mark.proves("managed/thousands-requests-wait-room")
async def test_other_keys_do_not_wait_either_while_a_slow_worker_makes_room(stack, broker):
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(3000))
    for number in range(10):
        await ask(stack, 10_000 + number, key="other")
    for _ in range(20):
        await serve_one(stack)
        await stack.clock.advance(0.5)
    assert waiting(stack, None, "other") == bodies(*range(10_000, 10_010))


async def test_request_to_another_group_of_the_same_key_does_not_wait(stack, clock):
    away = "FROM /* WHERE to = 'b' INTO BrokeredEndpoint('/modules/b/inputs/store')"
    await change(stack, away=away, rest=REST)
    await limit(stack, "b", EnqueueTimeout=60)
    await ask(stack, *range(LIMIT + 1), headers={"to": "b"})
    await ask(stack, 100)
    await clock.advance(5.0)
    assert (len(waiting(stack, None, "b")), bodies(100)[0] in waiting(stack, None)) == (LIMIT, True)


@pytest.mark.proves("managed/thousands-requests-wait-room")
@pytest.mark.parametrize(("name", "most"), [("MAX_WAITING", 10), ("MAX_WAITING_BYTES", 20)])
async def test_too_many_waiting_requests_overflow_at_once(stack, broker, monkeypatch, name, most):
    monkeypatch.setattr(lengths, name, most)
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(TOTAL))
    await stack.clock.advance(5.0)
    assert len(statuses(broker)) == TOTAL - LIMIT - 10


async def test_policy_that_goes_lets_waiting_requests_in_before_later_ones(stack, clock):
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(TOTAL))
    await clock.advance(1.0)
    await stack.term.routing.policies.clear(author="me")
    await ask(stack, TOTAL)
    await clock.advance(5.0)
    assert waiting(stack, None) == bodies(*range(TOTAL + 1))


@pytest.mark.proves("managed/request-expires-cancelled-waits")
async def test_request_behind_others_is_answered_when_it_expires(stack, broker):
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(LIMIT + 3))
    await ask(stack, 100, 101, expiration=5000)
    await ask(stack, 102)
    await stack.clock.advance(5.0 + 1.0)
    assert statuses(broker) == {"100": "expired", "101": "expired"}
    assert value(stack, "osrdyne_enqueue_waiting") == 4
    await stack.clock.advance(60.0)
    refused = {f"{number}": "queue-full" for number in (LIMIT, LIMIT + 1, LIMIT + 2, 102)}
    assert statuses(broker) == {"100": "expired", "101": "expired"} | refused
    assert (stack.orphans(), waiting(stack, None)) == ([], bodies(*range(LIMIT)))
    assert (value(stack, "osrdyne_enqueue_waiting"), stack.is_held(Key("a"))) == (0, False), "the group may end"


@pytest.mark.proves("managed/request-expires-cancelled-waits")
@pytest.mark.parametrize("number", [LIMIT, LIMIT + 1], ids=["first", "behind"])
async def test_request_that_waits_for_room_is_cancelled(stack, broker, number):
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(LIMIT + 2))
    await stack.clock.advance(1.0)
    await cancel(stack, number, key="b")
    await cancel(stack, number, reply_to="elsewhere")
    await stack.clock.advance(1.0)
    assert (answers(broker), value(stack, "osrdyne_enqueue_waiting")) == ([], 2)
    await cancel(stack, number)
    await stack.clock.advance(1.0)
    assert statuses(broker) == {f"{number}": "cancelled"}
    await stack.clock.advance(60.0)
    (other,) = {LIMIT, LIMIT + 1} - {number}
    assert statuses(broker) == {f"{number}": "cancelled", f"{other}": "queue-full"}
    assert (stack.orphans(), waiting(stack, None)) == ([], bodies(*range(LIMIT)))
    assert not stack.is_held(Key("a")), "the group may end"


async def test_request_cancelled_while_its_queue_is_counted_is_not_published(stack, broker):
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(LIMIT + 1))
    await stack.clock.advance(1.0)
    await serve_one(stack)
    looked_up = broker.count("look_up", "pool-req-a")
    counted = hold(broker, ("look_up", "pool-req-a", True))
    await stack.clock.advance(1.0)
    assert broker.count("look_up", "pool-req-a") > looked_up
    await cancel(stack, LIMIT)
    counted.set()
    await stack.clock.advance(1.0)
    assert statuses(broker) == {f"{LIMIT}": "cancelled"}
    assert (stack.orphans(), waiting(stack, None)) == ([], bodies(*range(1, LIMIT)))


@pytest.mark.parametrize(
    ("step", "first"),
    [(("publish", REPLIES, False), []), (("ack", "pool-orphan", False), [(f"{LIMIT + 1}", "cancelled")])],
    ids=["answer", "ack"],
)
@pytest.mark.proves("managed/leader-dies-answers-cancelled")
async def test_leader_killed_while_it_answers_a_cancelled_request_loses_none(stack, clock, broker, step, first):
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(LIMIT + 2))
    await clock.advance(1.0)
    hold(broker, step)
    await cancel(stack, LIMIT + 1)
    await clock.advance(1.0)
    await stack.kill()
    broker.hook = None
    assert (len(stack.orphans()), answers(broker)) == (2, first)
    async with managing(clock, broker) as following:
        await clock.advance(70.0)
        # It waits anew: the next leader knows no cancels of the previous one.
        again = [(f"{LIMIT}", "queue-full"), (f"{LIMIT + 1}", "queue-full")]
        assert (answers(broker), waiting(following, None)) == ([*first, *again], bodies(*range(LIMIT)))


async def test_count_includes_requests_of_other_keys_that_are_not_in_the_queue_yet(stack):
    await change(stack, all=TO_B)
    await limit(stack, "b", EnqueueTimeout=0)
    await ask(stack, 0, key="key-0")
    await stack.clock.advance(5.0)
    go_on = hold(stack.broker, ("publish", "pool-work-xchg", False))
    for number in range(1, TOTAL):
        await ask(stack, number, key=f"key-{number}")
    await stack.clock.settle()
    go_on.set()
    await stack.clock.advance(5.0)
    assert waiting(stack, None, "b") == bodies(*range(LIMIT))
    assert statuses(stack.broker) == {f"{number}": "queue-full" for number in range(LIMIT, TOTAL)}


async def test_requests_of_all_levels_count_and_the_least_urgent_goes_first(stack, clock):
    alert = {"headers": {"level": "alert"}}
    await change(stack, alerts=ALERTS, rest=REST)
    await limit(stack, EnqueueTimeout=0, Overflow="DiscardExistingMessage")
    await ask(stack, 0, 1, **alert)
    await ask(stack, 2, 3, 4, 5, 6)
    await clock.advance(5.0)
    assert (waiting(stack, 0), waiting(stack, None)) == (bodies(0, 1), bodies(4, 5, 6))


async def test_copy_without_room_is_dropped_and_the_request_goes_on(stack, broker):
    await change(stack, rest=REST, copy=COPY)
    await limit(stack, "b", EnqueueTimeout=60)
    await ask(stack, *range(LIMIT + 3))
    await stack.clock.advance(5.0)
    assert (waiting(stack, 4, "b"), answers(broker)) == (bodies(*range(LIMIT)), [])
    assert waiting(stack, None) == bodies(*range(LIMIT + 3))


async def test_error_with_one_queue_repeats_nothing_of_another(stack, broker):
    confirmed, errors = asyncio.Event(), [BrokerUnavailableError("The channel was closed.")]

    async def act(command):
        if command == ("publish", REPLIES, True):
            await confirmed.wait()
        if command == ("get", "pool-req-b", False) and errors:
            raise errors.pop()

    await limit(stack, "{key}", EnqueueTimeout=0, Overflow="DiscardExistingMessage")
    await ask(stack, *range(LIMIT))
    await ask(stack, *range(100, 100 + LIMIT), key="b")
    await stack.clock.advance(1.0)
    broker.hook = act
    await ask(stack, LIMIT)
    await stack.clock.advance(1.0)
    await ask(stack, 100 + LIMIT, key="b")
    await stack.clock.advance(1.0)
    confirmed.set()
    await stack.clock.advance(5.0)
    assert (errors, statuses(broker)) == ([], {"0": "maxlen", "100": "maxlen"})
    assert waiting(stack, None) == bodies(*range(1, LIMIT + 1))
    assert waiting(stack, None, "b") == bodies(*range(101, 101 + LIMIT))


@pytest.mark.parametrize("error", [QueueFullError("nack"), BrokerAccessError("refused")], ids=["full", "no permission"])
@pytest.mark.proves("requests/reply-queue-full")
async def test_answers_to_what_was_taken_out_wait_and_hold_up_nothing(stack, clock, broker, error):
    is_refused = True
    refuse(broker, error, ("publish", REPLIES, False), when=lambda: is_refused)
    await limit(stack, EnqueueTimeout=0, Overflow="DiscardExistingMessage")
    await ask(stack, *range(TOTAL))
    await clock.advance(1.0)
    assert (len(broker.queues["pool-req-a"].ready), stack.orphans()) == (LIMIT, [])
    await clock.advance(60.0)
    is_refused = False
    await clock.advance(15.0)
    assert statuses(broker) == {f"{number}": "maxlen" for number in range(TOTAL - LIMIT)}
    assert waiting(stack, None) == bodies(*range(TOTAL - LIMIT, TOTAL))


@pytest.mark.proves("managed/length-queue-cannot-counted")
async def test_none_is_taken_out_while_the_length_is_not_known(stack, broker):
    await limit(stack, EnqueueTimeout=0, Overflow="DiscardExistingMessage")
    await ask(stack, *range(LIMIT))
    await stack.clock.advance(1.0)
    await serve_one(stack)
    refuse(broker, BrokerUnavailableError("No answer."), ("look_up", "pool-req-a", False))
    await ask(stack, LIMIT)
    await stack.clock.advance(5.0)
    assert (waiting(stack, None), answers(broker)) == (bodies(*range(1, LIMIT)), [])
    broker.hook = None
    await stack.clock.advance(5.0)
    assert (waiting(stack, None), answers(broker)) == (bodies(*range(1, LIMIT + 1)), [])


@pytest.mark.proves("managed/leader-dies-stopped-requests")
async def test_end_does_not_wait_for_room(stack, clock, broker, monkeypatch):
    monkeypatch.setattr(consumers, "DRAIN_TIMEOUT", 3600.0)
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(TOTAL))
    await clock.advance(5.0)
    stack.stop.requested.set()
    async with asyncio.timeout(60):
        await asyncio.wait({stack.task})
    assert (stack.orphans(), answers(broker)) == (bodies(*range(LIMIT, TOTAL)), [])
    assert (waiting(stack, None), value(stack, "osrdyne_enqueue_waiting")) == (bodies(*range(LIMIT)), 0)


@pytest.mark.proves("managed/leader-dies-stopped-requests")
async def test_requests_of_a_killed_leader_wait_with_the_next_in_their_order(stack, broker):
    await limit(stack, EnqueueTimeout=60)
    await ask(stack, *range(TOTAL))
    await stack.clock.advance(5.0)
    assert value(stack, "osrdyne_enqueue_waiting") == TOTAL - LIMIT
    await stack.kill()
    assert (len(stack.orphans()), value(stack, "osrdyne_enqueue_waiting")) == (TOTAL - LIMIT, 0)
    async with managing(stack.clock, broker) as following:
        await stack.clock.advance(5.0)
        assert (len(waiting(following, None)), answers(broker)) == (LIMIT, [])
        worker = await following.consume("a")
        served = []
        while len(served) < TOTAL:
            delivery = await worker.get()
            served.append(delivery.body)
            await delivery.ack()
            await stack.clock.advance(1.0)
        assert served == bodies(*range(TOTAL))


@pytest.mark.parametrize(
    ("step", "times"),
    [(("get", "pool-req-a", True), 1), (("publish", REPLIES, True), 2), (("ack", "pool-req-a", False), 2)],
    ids=["get", "answer", "ack"],
)
@pytest.mark.proves("managed/leader-dies-takes-oldest")
async def test_leader_killed_while_it_takes_out_the_oldest_request_loses_none(stack, clock, broker, step, times):
    """A request that was answered, and not acknowledged, is answered a second time with the same status."""
    await limit(stack, EnqueueTimeout=0, Overflow="DiscardExistingMessage")
    await ask(stack, *range(LIMIT))
    await clock.advance(1.0)
    hold(broker, step)
    await ask(stack, LIMIT)
    await clock.advance(1.0)
    await stack.kill()
    broker.hook = None
    assert waiting(stack, None) == bodies(*range(LIMIT))
    async with managing(clock, broker) as following:
        await clock.advance(5.0)
        assert answers(broker) == [("0", "maxlen")] * times
        assert waiting(following, None) == bodies(*range(1, LIMIT + 1))


@pytest.mark.proves("managed/length-queue-cannot-counted")
async def test_length_is_unknown_while_a_publish_is_not_confirmed(stack, clock, broker, monkeypatch):
    monkeypatch.setattr(lengths, "COUNT_TIMEOUT", 0.01)
    await limit(stack, EnqueueTimeout=5)
    await ask(stack, *range(LIMIT - 1))
    await clock.advance(1.0)
    hold(broker, ("publish", "pool-work-xchg", True))
    await ask(stack, LIMIT - 1, LIMIT)
    await clock.advance(1.0)
    assert (len(waiting(stack, None)), answers(broker)) == (LIMIT, [])

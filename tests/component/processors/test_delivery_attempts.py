"""Requests that wait for their queue, whose publish is tried again, or whose queue becomes unavailable: in direct and
managed pools."""

import asyncio

import pytest
from broker_steps import Step, refuse
from managed_pool import COPY, REST, managing, waiting
from replies import REPLIES, answers

from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.errors import BrokerSilentError, MessageTooLargeError, PublishRefusedError, QueueFullError
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.fakes.stack import Stack, leading
from osrdyne.testing.keys import ODD_KEYS

A = Key("a")


def forward_of(stack: Stack) -> Step:
    """The publish of a request to its queue."""
    exchange = (
        stack.names.work_exchange(None) if stack.settings.pool.kind == "managed" else stack.names.requests_exchange
    )
    return ("publish", exchange, False)


async def publish(stack: Stack, deadline: float | None = None) -> None:
    headers = {} if deadline is None else {DEADLINE_HEADER: round((stack.clock.time() + deadline) * 1000)}
    await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c", headers=headers)


@pytest.mark.proves("reference-defects/9-keys-were-bound")
async def test_request_of_any_key_reaches_the_queue_of_exactly_this_key(any_pool):
    """defects: encoded-keys."""
    for key in ODD_KEYS.values():
        await any_pool.publish(key, key.encode())
    await any_pool.clock.settle()
    assert any_pool.orphans() == []
    for key in ODD_KEYS.values():
        assert any_pool.waiting(key) == [key.encode()]


@pytest.mark.proves("reference-defects/3-one-busy-key")
async def test_thousands_that_wait_for_one_key_hold_back_no_other(any_pool):
    """lifecycle: bind-waits-for-stop: its worker is just being stopped, so that its bind has to wait."""
    bodies = [b"%d" % number for number in range(2000)]
    any_pool.require(A)
    await any_pool.clock.settle()
    any_pool.driver.workers_of(A)[0].stubborn = True
    any_pool.retire(A)
    while not any_pool.workers_of(A).stopping:
        await any_pool.clock.advance(0.5)
    for body in bodies:
        await any_pool.publish("a", body)
    await any_pool.publish("other", b"x")
    await any_pool.clock.advance(10.0)
    assert (any_pool.waiting("other"), any_pool.waiting("a")) == ([b"x"], [])
    await any_pool.clock.advance(30.0)
    assert (any_pool.waiting("a"), any_pool.orphans()) == (bodies, [])


@pytest.mark.proves("broker/queue-leader-too-many")
@pytest.mark.parametrize("deadline", [60.0, None])
async def test_request_that_no_queue_confirms_is_answered_when_its_time_is_over(any_pool, broker, deadline):
    """Without a deadline, it is held no longer than it may wait in a queue."""
    error, forward = BrokerSilentError("no confirm"), forward_of(any_pool)
    refuse(broker, error, forward, when=lambda: any_pool.has_queue("a"))
    requests = any_pool.settings.requests
    await publish(any_pool, deadline)
    await any_pool.clock.advance((deadline or requests.ttl) - 10.0)
    assert (answers(broker), any_pool.orphans()) == ([], [b"1"])
    # The attempts are 5, 10, 20, 40, … seconds apart: the last wait ends at the deadline.
    await any_pool.clock.advance(11.0 + requests.max_clock_skew if deadline else 200.0)
    assert (answers(broker), any_pool.orphans(), any_pool.task.done()) == ([("c", "expired")], [], False)


@pytest.mark.proves("broker/queue-leader-too-many")
@pytest.mark.parametrize("pool", [leading, managing], ids=["direct", "managed"])
@pytest.mark.parametrize("deadline", [60.0, None])
async def test_request_whose_queue_cannot_be_bound_is_answered_when_its_time_is_over(clock, broker, pool, deadline):
    # A new leader finds the queue unbound and without a leader.
    broker.declare_queue("pool-req-a", request_queue_arguments(PoolNames("pool"), A)).running = False
    async with pool(clock, broker=broker) as stack:
        await publish(stack, deadline)
        await clock.advance((deadline or stack.settings.requests.ttl) - 1.0)
        assert (answers(broker), stack.orphans()) == ([], [b"1"])
        await clock.advance(10.0)
        assert (answers(broker), stack.orphans(), stack.task.done()) == ([("c", "expired")], [], False)


@pytest.mark.parametrize("error", [PublishRefusedError("unroutable"), BrokerSilentError("no confirm")])
async def test_conflict_at_a_later_try_is_answered(any_pool, broker, error):
    async def refuse_once(command):
        """Meanwhile a foreign queue takes the place of the queue."""
        if command == forward_of(any_pool) and any_pool.has_queue("a"):
            broker.hook = None
            broker.delete_queue("pool-req-a")
            broker.declare_queue("pool-req-a", {"x-queue-type": "classic"})
            any_pool.set_queue(A, exists=False, binding="unknown")
            any_pool.term.queues.loop.reconcile(A)
            raise error

    broker.hook = refuse_once
    await publish(any_pool)
    await any_pool.clock.advance(10.0)
    assert (answers(broker), any_pool.orphans(), any_pool.task.done()) == ([("c", "start-failed")], [], False)


@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFullError("full"), "maxlen"), (MessageTooLargeError("131073 bytes"), "invalid")],
    ids=["full queue", "headers too large"],
)
async def test_forward_that_cannot_succeed_is_answered(any_pool, error, status):
    refuse(any_pool.broker, error, forward_of(any_pool), when=lambda: any_pool.has_queue("a"))
    await publish(any_pool)
    await any_pool.clock.settle()
    assert (answers(any_pool.broker), any_pool.orphans(), any_pool.task.done()) == ([("c", status)], [], False)


@pytest.mark.proves("requests/reply-queue-full")
async def test_group_may_end_while_the_answer_to_its_request_waits(any_pool, clock):
    steps, is_refused = (forward_of(any_pool), ("publish", REPLIES, False)), True
    refuse(any_pool.broker, QueueFullError("full"), *steps, when=lambda: any_pool.has_queue("a") and is_refused)
    await publish(any_pool)
    await clock.settle()
    assert (len(any_pool.orphans()), any_pool.term.state.tracker.is_held(A)) == (1, False)
    is_refused = False
    await clock.advance(5.0)
    assert (answers(any_pool.broker), any_pool.orphans()) == ([("c", "maxlen")], [])


@pytest.mark.proves("requests/reply-queue-full")
async def test_group_of_a_copy_is_held_until_its_queue_confirms(clock, broker):
    confirmed, b = asyncio.Event(), Key("b")
    async with managing(clock, broker, rest=REST, copy=COPY) as stack:
        full = {forward_of(stack), ("publish", REPLIES, False)}

        async def act(command):
            if command in full and not confirmed.is_set():
                raise QueueFullError("full")
            if command == ("publish", stack.names.work_exchange(4), False):
                await confirmed.wait()

        broker.hook = act
        await publish(stack)
        await clock.settle()
        is_held = stack.term.state.tracker.is_held
        assert (is_held(A), is_held(b), len(stack.orphans())) == (False, True, 1)
        confirmed.set()
        await clock.settle()
        assert (is_held(b), len(waiting(stack, 4, "b"))) == (False, 1)
        await clock.advance(5.0)
        assert (answers(broker), stack.orphans()) == ([("c", "maxlen")], [])

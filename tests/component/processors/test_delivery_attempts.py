"""Requests whose publish is tried again and whose queue becomes unavailable, in direct and managed pools."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from broker_steps import refuse
from managed_pool import REST, managing
from replies import REPLIES, answers, broker_with_replies

from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.errors import BrokerSilentError, PublishRefusedError
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading

A = Key("a")
Lead = Callable[[VirtualClock, FakeBroker], AbstractAsyncContextManager[Stack]]


def direct(clock: VirtualClock, broker: FakeBroker) -> AbstractAsyncContextManager[Stack]:
    return leading(clock, broker=broker)


def managed(clock: VirtualClock, broker: FakeBroker) -> AbstractAsyncContextManager[Stack]:
    return managing(clock, broker, rest=REST)


def without_leader(broker: FakeBroker) -> None:
    """Declare a queue that a new leader finds unbound and without a leader."""
    broker.declare_queue("pool-req-a", request_queue_arguments(A)).running = False


def put_a_foreign_queue_in_its_place(stack: Stack) -> None:
    stack.broker.delete_queue("pool-req-a")
    stack.broker.declare_queue("pool-req-a", {"x-queue-type": "classic"})
    stack.set_queue(A, exists=False, binding="unknown")
    stack.term.queues.loop.reconcile(A)


@pytest.mark.proves("broker/queue-leader-too-many")
@pytest.mark.parametrize(("lead", "exchange"), [(direct, "pool-req-xchg"), (managed, "pool-work-xchg")])
async def test_request_that_no_queue_confirms_is_answered_when_its_time_is_over(lead: Lead, exchange: str) -> None:
    clock = VirtualClock()
    broker = broker_with_replies(clock)
    async with lead(clock, broker) as stack:
        refuse(broker, BrokerSilentError("no confirm"), ("publish", exchange, False), when=lambda: stack.has_queue("a"))
        deadline = round(clock.time() * 1000) + 60_000
        await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c", headers={DEADLINE_HEADER: deadline})
        await clock.advance(50.0)
        assert (answers(broker), stack.orphans()) == ([], [b"1"])
        # The attempts are 5, 10, 20 and 40 seconds apart: the last wait ends at the deadline.
        await clock.advance(10.0 + stack.settings.requests.max_clock_skew + 1.0)
        assert (answers(broker), stack.orphans(), stack.task.done()) == ([("c", "expired")], [], False)


@pytest.mark.proves("broker/queue-leader-too-many")
@pytest.mark.parametrize(("lead", "exchange"), [(direct, "pool-req-xchg"), (managed, "pool-work-xchg")])
async def test_request_without_a_deadline_is_held_no_longer_than_it_may_wait_in_a_queue(
    lead: Lead, exchange: str
) -> None:
    clock = VirtualClock()
    broker = broker_with_replies(clock)
    async with lead(clock, broker) as stack:
        refuse(broker, BrokerSilentError("no confirm"), ("publish", exchange, False), when=lambda: stack.has_queue("a"))
        await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c")
        await clock.advance(stack.settings.requests.ttl - 10.0)
        assert (answers(broker), stack.orphans()) == ([], [b"1"])
        await clock.advance(200.0)
        assert (answers(broker), stack.orphans(), stack.task.done()) == ([("c", "expired")], [], False)


@pytest.mark.proves("broker/queue-leader-too-many")
@pytest.mark.parametrize("lead", [direct, managed])
@pytest.mark.parametrize("deadline", [60.0, None])
async def test_request_whose_queue_cannot_be_bound_is_answered_when_its_time_is_over(
    lead: Lead, deadline: float | None
) -> None:
    clock = VirtualClock()
    broker = broker_with_replies(clock)
    without_leader(broker)
    async with lead(clock, broker) as stack:
        headers = {} if deadline is None else {DEADLINE_HEADER: round((clock.time() + deadline) * 1000)}
        await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c", headers=headers)
        limit = stack.settings.requests.ttl if deadline is None else deadline
        await clock.advance(limit - 1.0)
        assert (answers(broker), stack.orphans()) == ([], [b"1"])
        await clock.advance(10.0)
        assert (answers(broker), stack.orphans(), stack.task.done()) == ([("c", "expired")], [], False)
        broker.set_running("pool-req-a", True)
        await clock.advance(60.0)
        assert stack.queue_of(A).bound_at is not None


@pytest.mark.parametrize(("lead", "exchange"), [(direct, "pool-req-xchg"), (managed, "pool-work-xchg")])
@pytest.mark.parametrize("error", [PublishRefusedError("unroutable"), BrokerSilentError("no confirm")])
async def test_conflict_at_a_later_try_is_answered(lead: Lead, exchange: str, error: Exception) -> None:
    clock = VirtualClock()
    broker = broker_with_replies(clock)
    async with lead(clock, broker) as stack:

        async def refuse_once(command: Command) -> None:
            if command == ("publish", exchange, False) and stack.has_queue("a"):
                broker.hook = None
                put_a_foreign_queue_in_its_place(stack)
                raise error

        broker.hook = refuse_once
        await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c")
        await clock.advance(10.0)
        assert (answers(broker), stack.orphans(), stack.task.done()) == ([("c", "start-failed")], [], False)

"""Cancels of clients: those that the leader keeps for requests that wait, and those that it sends to workers."""

import managed_pool
import pytest
from broker_steps import refuse
from managed_pool import REST, change, heard, listen, send, waiting
from replies import REPLIES, answers
from test_retry_queues import PLAIN, fail, time_out

from osrdyne.errors import PublishRefusedError
from osrdyne.processors.requests.cancellations import MAX_KEPT, KeptCancels, RequestName
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.testing.fakes.stack import Stack

A, W = Key("a"), WorkerId("later")


@pytest.fixture
async def stack(stack):
    await change(stack, plain=PLAIN)
    return stack


async def ask(stack: Stack) -> None:
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c")


async def cancel(stack: Stack, key: str = "a") -> None:
    await managed_pool.cancel(stack, key, correlation_id="c", reply_to=REPLIES)


async def report(stack: Stack, worker: str = W) -> None:
    await stack.report("a", Event.READY, worker)


def listen_as_worker(stack: Stack) -> None:
    listen(stack, stack.names.control_worker_routing_key(W))


def cancelled(stack: Stack) -> list[dict[str, object]]:
    """The cancels that the worker has received."""
    return [dict(one.details) for one in heard(stack) if one.command is Command.CANCEL]


@pytest.mark.proves("managed/worker-ends-request-tried")
async def test_later_worker_is_notified_once(stack, clock):
    await ask(stack)
    await fail(stack)
    await cancel(stack)
    await report(stack)  # it does not listen yet
    listen_as_worker(stack)
    await clock.advance(100.0)
    await report(stack)
    await report(stack)
    assert cancelled(stack) == [{"correlation_id": "c", "reply_to": REPLIES, "keep_for": 500.0}]


@pytest.mark.parametrize(("route", "key"), [(PLAIN, "b"), (REST, "a")], ids=["another group", "no retries"])
async def test_cancel_that_no_waiting_request_needs_is_not_kept(stack, route, key):
    await change(stack, only=route)
    await ask(stack)
    await cancel(stack, key)
    listen_as_worker(stack)
    await report(stack)
    assert cancelled(stack) == []


@pytest.mark.proves("managed/worker-ends-request-tried")
async def test_cancelled_request_whose_group_is_gone_is_answered_without_a_worker(stack):
    await ask(stack)
    await fail(stack)
    stack.retire(A)
    await stack.clock.advance(120.0)
    await cancel(stack)
    await time_out(stack)
    assert (answers(stack.broker), stack.running("a"), stack.orphans()) == ([("c", "cancelled")], 0, [])


async def test_new_request_of_the_name_is_another_one(stack):
    await ask(stack)
    await cancel(stack)
    await ask(stack)
    listen_as_worker(stack)
    await report(stack)
    assert (cancelled(stack), waiting(stack, None)) == ([], [b"1", b"1"])


@pytest.mark.parametrize("worker", ["x" * 5000, "漢" * 200, "#", ""], ids=["long", "wide", "pattern", "empty"])
async def test_odd_name_of_a_worker_does_no_harm(stack, worker):
    await ask(stack)
    await cancel(stack)
    await report(stack, worker)
    listen_as_worker(stack)
    await report(stack)
    assert (len(cancelled(stack)), stack.task.done()) == (1, False)


async def test_cancels_are_kept_for_their_time_and_in_bounded_memory(clock):
    kept = KeptCancels(clock)
    for number in range(MAX_KEPT + 1):
        kept.keep(RequestName(str(number), "r"), A, seconds=10.0)
    assert len(kept.unsent(W, lambda _: True)) == MAX_KEPT
    requests = [Request(key="a", path="", body=b"", correlation_id="1", reply_to=to) for to in ("r", "other", None)]
    assert [kept.was_cancelled(one) for one in requests] == [True, False, False]
    await clock.advance(11.0)
    assert kept.unsent(W, lambda _: True) == []


async def test_cancel_that_no_queue_takes_costs_nothing(direct):
    refuse(direct.broker, PublishRefusedError("nack"), ("publish", direct.names.control_exchange, False))
    await managed_pool.cancel(direct, "a", correlation_id="c", reply_to="r")
    assert (direct.broker.bodies(direct.names.cancel_queue), direct.task.done()) == ([], False)


async def test_cancel_reaches_the_workers_of_its_key_only_if_it_names_a_request(direct):
    key = "infra=42,timetable=24"
    listen(direct, direct.names.control_group_routing_key(Key(key)))
    named = [{"correlation_id": "c", "reply_to": "r"}, {"correlation_id": "\udcff", "reply_to": '"\n'}]
    for properties in ({}, {"correlation_id": "c"}, {"reply_to": "r"}, *named):
        await managed_pool.cancel(direct, key, **properties)
    await managed_pool.cancel(direct, "other", correlation_id="c", reply_to="r")
    assert direct.broker.bodies(direct.names.cancel_queue) == []
    assert [control.details for control in heard(direct)] == named
    assert {(one.command, one.generation) for one in heard(direct)} == {(Command.CANCEL, direct.generation)}

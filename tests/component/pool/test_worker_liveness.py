"""Workers that are alive and do not work: a real leader in virtual time, and workers whose reports the test chooses."""

import pytest

from osrdyne.amqp import Message
from osrdyne.pool.workers.liveness import QUIET_AFTER
from osrdyne.protocol.activity import REQUESTS_FIELD, ActivityReport, Event
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.broker import Command
from osrdyne.testing.fakes.stack import Stack

A = Key("a")
LONG_ENOUGH = 120.0
"""Seconds after which a busy worker without reports is replaced."""


@pytest.fixture
async def stack(stack):
    """A leader with one worker that has loaded its data."""
    stack.require(A)
    await stack.clock.settle()
    await stack.report("a", Event.STARTED)
    await stack.report("a", Event.READY, in_flight=0)
    return stack


def first_worker(stack: Stack) -> str:
    return stack.driver.workers_of(A)[0].instance.worker_id


def questions(stack: Stack) -> int:
    return stack.broker.count("publish", stack.names.control_exchange)


def answering(stack: Stack, event: Event, **details: object) -> None:
    """From now on the first worker answers when it is asked."""
    report = ActivityReport("a", event, first_worker(stack), details)
    message = Message(body=report.wire_body(), headers=report.wire_headers())

    async def answer(command: Command) -> None:
        if command == ("publish", stack.names.control_exchange, True):
            await stack.broker.publish(message, exchange=stack.names.activity_exchange, routing_key="a")

    stack.broker.hook = answer


@pytest.mark.proves("workers/worker-hangs-disconnected")
async def test_busy_worker_that_falls_silent_is_asked_twice_and_replaced(stack, clock):
    """Should its request reach the delivery limit, the evidence names the worker that hung with it."""
    worker, asked = first_worker(stack), questions(stack)
    await stack.report("a", Event.BUSY, in_flight=1, **{REQUESTS_FIELD: ["print"]})
    await clock.advance(LONG_ENOUGH)
    assert (questions(stack) - asked, stack.driver.count("stop"), stack.running("a")) == (2, 1, 1)
    assert first_worker(stack) != worker
    (death,) = stack.deaths_of(A, "print")
    assert death.ended_with == "it did not answer"


async def test_worker_that_reports_or_answers_stays_however_long_it_works(stack, clock):
    for _ in range(720):
        await stack.report("a", Event.BUSY, in_flight=1)
        await clock.advance(5.0)
    assert stack.driver.count("stop") == 0
    answering(stack, Event.BUSY, in_flight=1)  # its reports get lost
    await clock.advance(1000.0)
    assert (stack.driver.count("stop"), questions(stack) > 5) == (0, True)


async def test_worker_that_speaks_part_of_the_protocol_is_left_alone(stack, clock):
    stack.forget(first_worker(stack))
    await stack.report("a", Event.REQUEST_RECEIVED)
    await clock.advance(500.0)
    assert stack.driver.count("stop") == 0


@pytest.mark.proves("workers/worker-answers-control-messages")
async def test_worker_that_reports_idle_while_requests_wait_is_replaced(stack, clock):
    answering(stack, Event.READY, in_flight=0)
    await stack.publish("a", b"1")
    await clock.advance(300.0)
    assert (stack.driver.count("stop"), stack.running("a"), stack.waiting("a")) == (1, 1, [b"1"])


@pytest.mark.parametrize("why", ["behind others", "held by a connection that is dead"])
async def test_requests_that_wait_without_the_fault_of_a_worker_replace_none(stack, clock, why):
    answering(stack, Event.READY, in_flight=0)
    await stack.publish("a", b"1")
    if why != "behind others":
        await stack.take("a")
    for _ in range(60):
        if why == "behind others":
            await stack.report("a", Event.REQUEST_COMPLETED, in_flight=0)
        await clock.advance(10.0)
    assert stack.driver.count("stop") == 0


@pytest.mark.parametrize(
    ("state", "answers", "stops"),
    [
        ({"paused": True}, {"paused": True}, 1),
        ({"generation": [10**12, 1]}, {"generation": [10**12, 1]}, 1),
        ({"paused": True}, {"paused": False}, 0),
    ],
    ids=["paused", "follows a later generation", "resumes"],
)
@pytest.mark.proves("workers/worker-paused-follows-control")
async def test_paused_worker_is_replaced_unless_it_resumes_on_command(stack, clock, state, answers, stops):
    worker, asked = first_worker(stack), questions(stack)
    answering(stack, Event.READY, in_flight=0, **answers)
    await stack.report("a", Event.READY, in_flight=0, **state)
    await clock.advance(LONG_ENOUGH)
    assert (stack.driver.count("stop"), stack.running("a")) == (stops, 1)
    if stops:
        assert (questions(stack) - asked >= 2, first_worker(stack) != worker) == (True, True)
    else:
        assert not stack.report_of(worker).paused  # type: ignore[union-attr]


async def test_no_worker_is_blamed_while_rabbitmq_blocks_publishers(stack, clock):
    blocked = True

    async def block(command):
        while blocked and command == ("publish", stack.names.control_exchange, False):
            await clock.sleep(10.0)

    stack.broker.hook = block
    await stack.report("a", Event.BUSY, in_flight=1)
    await clock.advance(600.0)
    blocked = False
    await clock.advance(11.0)
    await stack.report("a", Event.BUSY, in_flight=1)
    await clock.advance(20.0)
    assert stack.driver.count("stop") == 0


async def test_quiet_worker_is_asked_now_and_then(stack, clock):
    """A worker that was started by hand is forgotten: nothing else shows that it is gone."""
    stack.pin(A)
    asked = questions(stack)
    answering(stack, Event.READY, in_flight=0)
    await clock.advance(QUIET_AFTER - 20.0)
    assert questions(stack) == asked
    await clock.advance(QUIET_AFTER)
    assert (questions(stack) - asked, stack.driver.count("stop")) == (1, 0)
    await stack.report("a", Event.READY, "by-hand", in_flight=0)
    await clock.advance(2 * QUIET_AFTER + LONG_ENOUGH)
    assert [worker.worker_id for worker in stack.reports_of(A)] == [first_worker(stack)]


@pytest.mark.proves("workers/worker-hangs-disconnected")
async def test_hanging_idle_worker_is_replaced(stack, clock):
    await clock.advance(QUIET_AFTER + LONG_ENOUGH)
    assert (stack.driver.count("stop"), stack.running("a")) == (1, 1)


@pytest.mark.parametrize("silent", ["one of two", "both"])
async def test_deployment_is_replaced_when_none_of_its_workers_answers(stack, clock, silent):
    """One of several is for the platform to replace; it is forgotten."""
    instance = first_worker(stack)
    stack.forget(instance)
    stays = [f"{instance}.y"] if silent == "one of two" else []
    for worker in (f"{instance}.x", f"{instance}.y"):
        await stack.report("a", Event.BUSY, worker, in_flight=1)
    for _ in range(24):
        for worker in stays:
            await stack.report("a", Event.BUSY, worker, in_flight=1)
        await clock.advance(5.0)
    assert (stack.driver.count("stop"), [one.worker_id for one in stack.reports_of(A)]) == (int(not stays), stays)

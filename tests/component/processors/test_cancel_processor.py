"""Cancels of clients are sent to the workers of the group: a real leader in memory."""

from __future__ import annotations

import pytest
from broker_steps import refuse

from osrdyne.amqp import Message
from osrdyne.errors import PublishRefusedError
from osrdyne.protocol.control import Command, control_from_wire
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack


@pytest.fixture
def stack(direct: Stack) -> Stack:
    return direct


async def cancel(stack: Stack, key: str, **properties: object) -> None:
    message = Message(**properties)  # type: ignore[arg-type]
    await FakeChannel(stack.broker).publish(message, exchange=stack.names.cancel_exchange, routing_key=key)
    await stack.clock.settle()


def worker_hears(broker: FakeBroker, stack: Stack, key: str) -> None:
    """A worker's control queue."""
    broker.declare_queue("ctl", {})
    broker.bind("ctl", stack.names.control_exchange, stack.names.control_group_routing_key(key))  # type: ignore[arg-type]


async def test_cancel_reaches_the_workers_of_its_key_only(stack: Stack) -> None:
    worker_hears(stack.broker, stack, "infra=42,timetable=24")
    await cancel(stack, "infra=42,timetable=24", correlation_id="c", reply_to="r")
    await cancel(stack, "other", correlation_id="c", reply_to="r")
    (stored,) = stack.broker.queues["ctl"].ready
    control = control_from_wire(stored.message.body)
    assert control is not None
    assert (control.command, control.details) == (Command.CANCEL, {"correlation_id": "c", "reply_to": "r"})
    assert control.generation == stack.generation


@pytest.mark.parametrize(
    "properties", [{}, {"correlation_id": "c"}, {"reply_to": "r"}], ids=["nothing", "no reply address", "no id"]
)
async def test_cancel_that_names_no_request_is_dropped(stack: Stack, properties: dict[str, object]) -> None:
    worker_hears(stack.broker, stack, "a")
    await cancel(stack, "a", **properties)
    assert (stack.broker.bodies("ctl"), stack.broker.bodies(stack.names.cancel_queue)) == ([], [])


async def test_cancel_with_a_key_that_is_not_utf8_is_dropped(stack: Stack) -> None:
    await cancel(stack, "\udcff", correlation_id="c", reply_to="r")
    assert (stack.broker.bodies(stack.names.cancel_queue), stack.task.done()) == ([], False)


async def test_cancel_with_odd_identifiers_is_passed_on(stack: Stack) -> None:
    worker_hears(stack.broker, stack, "a")
    await cancel(stack, "a", correlation_id="\udcff", reply_to='"\n')
    control = control_from_wire(stack.broker.bodies("ctl")[0])
    assert control is not None
    assert control.details == {"correlation_id": "\udcff", "reply_to": '"\n'}


async def test_cancel_that_no_queue_takes_costs_nothing(stack: Stack) -> None:
    refuse(stack.broker, PublishRefusedError("nack"), ("publish", stack.names.control_exchange, False))
    await cancel(stack, "a", correlation_id="c", reply_to="r")
    assert (stack.broker.bodies(stack.names.cancel_queue), stack.task.done()) == ([], False)

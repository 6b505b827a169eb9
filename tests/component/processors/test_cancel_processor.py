"""Cancels of clients are sent to the workers of the group: a real leader in memory."""

from __future__ import annotations

import pytest
from broker_steps import refuse
from managed_pool import cancel, heard, listen

from osrdyne.errors import PublishRefusedError
from osrdyne.protocol.control import Command
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.stack import Stack


@pytest.fixture
def stack(direct: Stack) -> Stack:
    return direct


async def test_cancel_reaches_the_workers_of_its_key_only(stack: Stack) -> None:
    listen(stack, stack.names.control_group_routing_key(Key("infra=42,timetable=24")))
    await cancel(stack, "infra=42,timetable=24", correlation_id="c", reply_to="r")
    await cancel(stack, "other", correlation_id="c", reply_to="r")
    (control,) = heard(stack)
    assert (control.command, control.details) == (Command.CANCEL, {"correlation_id": "c", "reply_to": "r"})
    assert control.generation == stack.generation


@pytest.mark.parametrize(
    "properties", [{}, {"correlation_id": "c"}, {"reply_to": "r"}], ids=["nothing", "no reply address", "no id"]
)
async def test_cancel_that_names_no_request_is_dropped(stack: Stack, properties: dict[str, object]) -> None:
    listen(stack, "group.a")
    await cancel(stack, "a", **properties)
    assert (heard(stack), stack.broker.bodies(stack.names.cancel_queue)) == ([], [])


async def test_cancel_with_odd_identifiers_is_passed_on(stack: Stack) -> None:
    listen(stack, "group.a")
    await cancel(stack, "a", correlation_id="\udcff", reply_to='"\n')
    (control,) = heard(stack)
    assert control.details == {"correlation_id": "\udcff", "reply_to": '"\n'}


async def test_cancel_that_no_queue_takes_costs_nothing(stack: Stack) -> None:
    refuse(stack.broker, PublishRefusedError("nack"), ("publish", stack.names.control_exchange, False))
    await cancel(stack, "a", correlation_id="c", reply_to="r")
    assert (stack.broker.bodies(stack.names.cancel_queue), stack.task.done()) == ([], False)

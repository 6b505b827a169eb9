"""A key whose commands cost the leader its token twice is left alone, and the others go on (LIFECYCLE 3)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from osrdyne.broker.layout import QueueLayout
from osrdyne.broker.quarantine import DURATION, Quarantine
from osrdyne.broker.queue_register import QueueRegister
from osrdyne.broker.request_queues import RequestQueueCommands
from osrdyne.broker.token import TokenChannel
from osrdyne.errors import BrokerConflictError, CommandRefusedError
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.clock import VirtualClock

A, B = Key("a"), Key("b")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_one_refusal_may_be_an_accident(clock: VirtualClock) -> None:
    quarantine = Quarantine(clock)
    quarantine.note(A, "406")
    assert quarantine.reason(A) is None


def test_second_refusal_leaves_the_key_alone_and_no_other(clock: VirtualClock) -> None:
    quarantine = Quarantine(clock)
    quarantine.note(A, "first")
    quarantine.note(A, "second")
    assert (quarantine.reason(A), quarantine.reason(B)) == ("second", None)


async def test_key_is_tried_again_after_a_while(clock: VirtualClock) -> None:
    quarantine = Quarantine(clock)
    quarantine.note(A, "first")
    quarantine.note(A, "second")
    await clock.advance(DURATION)
    assert quarantine.reason(A) is None
    quarantine.note(A, "third")
    assert quarantine.reason(A) is None


class Register:
    """Everything is written down."""

    async def written(self, key: Key) -> None:
        pass


class RefusingToken:
    """A token channel on which RabbitMQ refuses everything."""

    async def do(self, command: object) -> None:
        raise CommandRefusedError("403 ACCESS_REFUSED")


async def test_key_that_cost_the_token_twice_gets_a_fault_and_no_third_command(clock: VirtualClock) -> None:
    unused: Any = None
    layout = QueueLayout(PoolNames("pool"))
    layout.note(A, None)
    commands = RequestQueueCommands(
        names=PoolNames("pool"),
        token=cast("TokenChannel", RefusingToken()),
        scratch=unused,
        probing=unused,
        publisher=unused,
        management=unused,
        quarantine=Quarantine(clock),
        register=cast("QueueRegister", Register()),
        layout=layout,
        clock=clock,
    )
    for _ in range(2):
        with pytest.raises(CommandRefusedError):
            await commands.bind(A)
    with pytest.raises(BrokerConflictError, match="403 ACCESS_REFUSED"):
        await commands.bind(A)

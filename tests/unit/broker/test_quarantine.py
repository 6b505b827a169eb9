"""A key whose commands cost the leader its token twice is left alone, and the others go on (lifecycle:
token-channel-never-fails)."""

from typing import Any, cast

import pytest

from osrdyne.broker.leadership.channel_pool import LeaderChannels
from osrdyne.broker.leadership.token import TokenChannel
from osrdyne.broker.queues.durability import QueueDurability
from osrdyne.broker.queues.quarantine import DURATION, Quarantine
from osrdyne.broker.queues.request_queues import RequestQueueCommands
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.errors import BrokerConflictError, CommandRefusedError
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.testing.clock import VirtualClock

A, B = Key("a"), Key("b")


async def test_second_refusal_leaves_the_key_alone_for_a_while_and_no_other(clock):
    """After one its commands share no answer with others: a second refusal would prove nothing about them."""
    quarantine = Quarantine(clock)
    quarantine.note(A, "first")
    assert (quarantine.reason(A), quarantine.is_suspected(A), quarantine.is_suspected(B)) == (None, True, False)
    quarantine.note(A, "second")
    assert (quarantine.reason(A), quarantine.reason(B)) == ("second", None)
    await clock.advance(DURATION)
    assert quarantine.reason(A) is None
    quarantine.note(A, "third")
    assert quarantine.reason(A) is None


class Register:
    """Everything is persisted."""

    async def wait_persisted(self, key: Key) -> None:
        pass


class Token:
    """A token channel on which RabbitMQ refuses the first commands; notes which commands may share an answer."""

    def __init__(self, refuses: int) -> None:
        self.refuses = refuses
        self.shared: list[bool] = []

    async def do(self, command: object, *, begin: object) -> None:
        self.shared.append(begin is not None)
        if len(self.shared) <= self.refuses:
            raise CommandRefusedError("403 ACCESS_REFUSED")


def commands_over(token: Token, clock: VirtualClock) -> RequestQueueCommands:
    """Commands for the key a that need nothing but the token channel."""
    unused: Any = None
    layout = QueueLayout(PoolNames("pool"))
    layout.note(A, None)
    return RequestQueueCommands(
        channels=LeaderChannels(
            token=cast("TokenChannel", token), spare=unused, probing=unused, declaring=unused, publisher=unused
        ),
        management=unused,
        quarantine=Quarantine(clock),
        durability=cast("QueueDurability", Register()),
        layout=layout,
        clock=clock,
    )


@pytest.mark.proves("controller/rabbitmq-refuses-one-several")
async def test_keys_of_a_refused_answer_are_bound_alone(clock):
    """Which of them was refused is not known; the second refusal would be of the right one."""
    token = Token(refuses=1)
    commands = commands_over(token, clock)
    with pytest.raises(CommandRefusedError):
        await commands.bind(A)
    await commands.bind(A)
    assert token.shared == [True, False]


async def test_key_that_ended_the_token_channel_twice_gets_a_fault_and_no_third_command(clock):
    token = Token(refuses=3)
    commands = commands_over(token, clock)
    for error in (CommandRefusedError, CommandRefusedError, BrokerConflictError):
        with pytest.raises(error, match="403 ACCESS_REFUSED"):
            await commands.bind(A)
    assert len(token.shared) == 2

"""A queue that confirms nothing concerns its key alone; a connection that is silent concerns the term."""

from __future__ import annotations

from typing import Any

import pytest

from osrdyne.amqp import Message
from osrdyne.broker.publisher import LeaderPublisher
from osrdyne.errors import BrokerSilentError, BrokerUnavailableError
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.stack import leading

SILENT = BrokerSilentError("RabbitMQ did not answer in time.")


class SilentChannel:
    """Confirms nothing; answers other questions if `alive`."""

    def __init__(self, *, alive: bool) -> None:
        self._alive = alive

    async def publish(self, *_: object, **__: object) -> None:
        raise SILENT

    async def ping(self) -> None:
        if not self._alive:
            raise SILENT


@pytest.mark.parametrize(("alive", "is_silence"), [(True, True), (False, False)], ids=["queue", "connection"])
async def test_silence_is_told_apart_from_a_lost_connection(alive: bool, is_silence: bool) -> None:
    channel: Any = SilentChannel(alive=alive)
    with pytest.raises(BrokerUnavailableError) as caught:
        await LeaderPublisher(channel).publish(Message(), exchange="", routing_key="q")
    assert isinstance(caught.value, BrokerSilentError) is is_silence


async def test_queue_that_confirms_nothing_holds_up_its_own_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    async with leading(clock) as stack:
        publisher = stack.term._session.publisher
        publish, silent = publisher.publish, True

        async def publish_or_not(message: Message, **where: Any) -> None:
            if silent and where["routing_key"] == "a":
                raise SILENT
            await publish(message, **where)

        monkeypatch.setattr(publisher, "publish", publish_or_not)
        await stack.publish("a", b"1")
        await stack.publish("b", b"2")
        await clock.advance(2)
        assert (stack.orphans(), stack.waiting("b"), stack.task.done()) == ([b"1"], [b"2"], False)
        silent = False
        await clock.advance(10)
        assert (stack.orphans(), stack.waiting("a")) == ([], [b"1"])

"""A reading of the poison queue, on a broker in memory."""

from __future__ import annotations

import threading

import pytest

from osrdyne.amqp import Delivery, Message
from osrdyne.processors.poison import reader
from osrdyne.processors.poison.reader import Reading
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker

QUEUE = "p-poison"


async def never(delivery: Delivery) -> bool:
    return False


async def test_digests_of_large_bodies_are_computed_in_a_thread(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading has up to ten thousand bodies of any size, and several of them may have arrived at once."""
    threads: dict[int, str] = {}

    def entry_id(delivery: Delivery) -> str:
        threads[len(delivery.body)] = threading.current_thread().name
        return "same"

    monkeypatch.setattr(reader, "entry_id", entry_id)
    broker.declare_queue(QUEUE, {})
    channel = FakeChannel(broker)
    for size in (10, 100_000):
        await channel.publish(Message(body=b"x" * size), exchange="", routing_key=QUEUE)
    reading = Reading(channel, QUEUE, never, is_forged=lambda delivery: False)
    reading.expect(2)
    assert [record.id async for record, _ in reading] == ["same", "same.2"]
    here = threading.current_thread().name
    assert {size: thread == here for size, thread in threads.items()} == {10: True, 100_000: False}
    await reading.requeue()

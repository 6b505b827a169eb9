"""Inquiries about keys that are starting, without a broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from osrdyne.amqp import Message
from osrdyne.client import progress
from osrdyne.client.progress import StartInquiries, _Watch
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.progress import FIRST_INQUIRY, StartProgress


class Call:
    def starting(self, progress: StartProgress) -> None: ...


class Channel:
    """A channel whose messages reach no leader."""

    def __init__(self) -> None:
        self.asked = 0

    async def publish(self, message: Message, *, exchange: str, routing_key: str) -> None:
        self.asked += 1


async def test_inquiries_that_are_not_answered_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that always has calls waiting would otherwise remember all of them while the pool has no leader."""
    monkeypatch.setattr(progress, "_MAX_ASKED", 3)
    connection: Any = SimpleNamespace(is_blocked=False)
    inquiries, channel = StartInquiries(PoolNames("pool"), connection), Channel()
    waits_since = asyncio.get_running_loop().time() - FIRST_INQUIRY
    inquiries._watches[Key("k")] = watch = _Watch({Call(): waits_since})
    for _ in range(10):
        watch.ask_at = 0.0  # the interval is over
        await inquiries._ask_all(channel)  # type: ignore[arg-type]
    assert (channel.asked, list(inquiries._asked)) == (10, ["8", "9", "10"])

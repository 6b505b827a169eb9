"""Where a standby sends who asks it, and who goes there by itself."""

import asyncio
from typing import Any

import pytest

import osrdyne.daemon.inspector
from osrdyne.aio.clock import SystemClock
from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.daemon.leader_address import LeaderAddress
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.leaders import leader_to_ask
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.management import FakeManagement

LOCAL, REMOTE = "http://127.0.0.1:4243", "http://leader:4242"


class Standby(DaemonInspector):
    """A daemon that stands by; it is its own RabbitMQ, which knows this address or raises this error."""

    def __init__(self, announced: str | Exception | None, *, after: float = 0.0) -> None:
        unused: Any = None
        super().__init__(
            pool="p",
            state=DaemonState(),
            driver=unused,
            management=unused,
            pins=unused,
            leader=LeaderAddress(self, pool="p", own=lambda: LOCAL),
            prices={},
            clock=SystemClock(),
        )
        self._announced = announced
        self._after = after

    async def get_global_parameter(self, name: str) -> object | None:
        await asyncio.sleep(self._after)
        if isinstance(self._announced, Exception):
            raise self._announced
        return {"api": self._announced}

    async def put_global_parameter(self, name: str, value: object) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("announced", "after", "leader"),
    [
        (REMOTE, 0, REMOTE),
        (None, 0, None),
        (LOCAL, 0, None),
        (BrokerUnavailableError("gone"), 0, None),
        (REMOTE, 3600, None),
    ],
    ids=["another", "none", "itself before", "no answer", "slow"],
)
async def test_standby_knows_the_leader_that_has_announced_itself(monkeypatch, announced, after, leader):
    if after:
        monkeypatch.setattr(osrdyne.daemon.inspector, "FIND_TIMEOUT", 0.01)
    assert await Standby(announced, after=after).leader() == leader


async def test_announced_address_is_found_and_the_last_one_counts():
    management = FakeManagement(FakeBroker(SystemClock()))
    address = LeaderAddress(management, pool="p", own=lambda: "http://two:2")
    for value in (None, 1, "http://h", {"api": 5}, []):
        await management.put_global_parameter("osrdyne-p-leader", value)
        assert await address.find() is None, value
    await LeaderAddress(management, pool="p", own=lambda: "http://one:1").announce(term=1)
    await address.announce(term=2)
    assert await address.find() == "http://two:2"


def test_leader_on_another_hosts_loopback_is_not_asked():
    here, there = "http://127.0.0.1:4242", "http://standby:4242"
    asked = [(REMOTE, REMOTE), (here, LOCAL), ("http://[::1]:4242", "http://localhost:1"), (here, REMOTE)]
    others = [(there, LOCAL), (there, "http://[::1]:1"), (REMOTE, "ftp://leader"), (REMOTE, None)]
    for address, leader in asked + others:
        found = leader_to_ask(address, {"code": "not-leading", "leader": leader})
        assert found == (leader if (address, leader) in asked else None)
        assert leader_to_ask(address, {"code": "unknown-host", "leader": leader}) is None

"""Where a standby sends who asks it, and who goes there by itself."""

from __future__ import annotations

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.pool.leader_address import LeaderAddress
from osrdyne.protocol.leaders import leader_to_ask
from osrdyne.testing.broker import FakeBroker
from osrdyne.testing.management import FakeManagement

LOCAL, REMOTE = "http://127.0.0.1:4243", "http://leader:4242"


async def test_announced_address_is_found_and_the_last_one_counts() -> None:
    address = LeaderAddress(FakeManagement(FakeBroker(SystemClock())), pool="p")
    assert await address.find() is None
    await address.announce("http://one:1", term=1)
    await address.announce("http://two:2", term=2)
    assert await address.find() == "http://two:2"


@pytest.mark.parametrize("value", [None, 1, "http://h", {"api": 5}, []], ids=str)
async def test_nonsense_is_no_address(value: object) -> None:
    management = FakeManagement(FakeBroker(SystemClock()))
    await management.put_global_parameter("osrdyne-p-leader", value)
    assert await LeaderAddress(management, pool="p").find() is None


@pytest.mark.parametrize(
    ("asked", "leader", "goes"),
    [
        (REMOTE, REMOTE, True),
        ("http://127.0.0.1:4242", LOCAL, True),
        ("http://[::1]:4242", "http://localhost:1", True),
        ("http://127.0.0.1:4242", REMOTE, True),
        ("http://standby:4242", LOCAL, False),
        ("http://standby:4242", "http://[::1]:1", False),
        (REMOTE, "ftp://leader", False),
        (REMOTE, None, False),
    ],
)
def test_leader_on_another_hosts_loopback_is_not_asked(asked: str, leader: object, goes: bool) -> None:
    problem = {"code": "not-leading", "leader": leader}
    assert leader_to_ask(asked, problem) == (leader if goes else None)
    assert leader_to_ask(asked, {"code": "unknown-host", "leader": leader}) is None

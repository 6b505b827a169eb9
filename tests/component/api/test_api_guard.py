"""Which names in the Host header the API answers to."""

from __future__ import annotations

import httpx
import pytest

from osrdyne.api.access.guard import hosts_of
from osrdyne.api.app import create_app
from osrdyne.metrics import Metrics
from osrdyne.testing.fakes.inspector import FakeInspector


@pytest.mark.parametrize(
    ("address", "allowed", "host", "status"),
    [
        *[("127.0.0.1", (), host, 200) for host in ("localhost", "LOCALHOST:4242", "127.0.0.1:4242", "[::1]:4242")],
        *[("localhost", (), host, 421) for host in ("evil.example", "evil.example:4242", "localhost.evil.example")],
        *[("localhost", (), host, 421) for host in ("", "[", "10.0.0.1")],
        ("::1", ("Osrdyne.example",), "osrdyne.example", 200),
        ("0.0.0.0", (), "osrdyne:4242", 200),
        ("0.0.0.0", ("osrdyne",), "osrdyne", 200),
        ("0.0.0.0", ("osrdyne",), "evil.example", 421),
    ],
)
async def test_loopback_and_allowed_names_are_answered(
    address: str, allowed: tuple[str, ...], host: str, status: int
) -> None:
    """An open address without allowed names answers to all."""
    app = create_app(FakeInspector(), Metrics(), version="1", allowed_hosts=hosts_of(address, allowed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        assert (await client.get("/v1/groups", headers={"host": host})).status_code == status

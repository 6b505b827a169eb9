"""Which names in the Host header the API answers to."""

import httpx
import pytest

from osrdyne.api.access.guard import hosts_of
from osrdyne.api.app import create_app
from osrdyne.metrics import Metrics
from osrdyne.testing.fakes.inspector import FakeInspector


@pytest.mark.parametrize(
    ("address", "allowed", "answered", "refused"),
    [
        ("127.0.0.1", (), "localhost LOCALHOST:4242 127.0.0.1:4242 [::1]:4242", "evil.example:4242"),
        ("localhost", (), "localhost", "evil.example localhost.evil.example [ 10.0.0.1"),
        ("::1", ("Osrdyne.example",), "osrdyne.example", "evil.example"),
        ("0.0.0.0", (), "osrdyne:4242", ""),
        ("0.0.0.0", ("osrdyne",), "osrdyne", "evil.example"),
    ],
)
async def test_loopback_and_allowed_names_are_answered(address, allowed, answered, refused):
    """An open address without allowed names answers to all."""
    app = create_app(FakeInspector(), Metrics(), version="1", allowed_hosts=hosts_of(address, allowed))
    hosts = dict.fromkeys(refused.split(), 421) | dict.fromkeys(answered.split(), 200)
    hosts |= {"": 421} if refused else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        found = {host: (await client.get("/v1/groups", headers={"host": host})).status_code for host in hosts}
    assert found == hosts

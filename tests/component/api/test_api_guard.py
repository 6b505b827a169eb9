"""Which names in the Host header the API answers to."""

from __future__ import annotations

import httpx
import pytest

from osrdyne.api.access.guard import hosts_of
from osrdyne.api.app import create_app
from osrdyne.metrics import Metrics
from osrdyne.testing.fakes.inspector import FakeInspector


async def status_for(host: str, *, address: str, allowed: tuple[str, ...] = ()) -> int:
    app = create_app(FakeInspector(), Metrics(), version="1", allowed_hosts=hosts_of(address, allowed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        return (await client.get("/v1/groups", headers={"host": host})).status_code


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:4242", "127.0.0.1:4242", "[::1]:4242"])
async def test_loopback_answers_to_its_own_names(host: str) -> None:
    assert await status_for(host, address="127.0.0.1") == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4242", "localhost.evil.example", "", "[", "10.0.0.1"])
async def test_loopback_answers_to_no_other_name(host: str) -> None:
    assert await status_for(host, address="localhost") == 421


async def test_allowed_name_is_answered_on_loopback() -> None:
    assert await status_for("osrdyne.example", address="::1", allowed=("Osrdyne.example",)) == 200


async def test_open_address_answers_to_every_name() -> None:
    assert await status_for("osrdyne:4242", address="0.0.0.0") == 200


async def test_open_address_with_allowed_names_answers_only_to_them() -> None:
    assert await status_for("osrdyne", address="0.0.0.0", allowed=("osrdyne",)) == 200
    assert await status_for("evil.example", address="0.0.0.0", allowed=("osrdyne",)) == 421

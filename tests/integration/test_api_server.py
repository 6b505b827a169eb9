"""The API behind a real socket: a port that is taken, a graceful stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from broker_api import PATIENCE

from osrdyne.api.access.guard import hosts_of
from osrdyne.api.app import create_app
from osrdyne.api.server import ApiServer, bind_socket
from osrdyne.config.models import ApiSettings
from osrdyne.errors import ConfigurationError, PortTakenError
from osrdyne.metrics import Metrics
from osrdyne.testing.fakes.inspector import FakeInspector

pytestmark = pytest.mark.one_rabbitmq

JSON = {"content-type": "application/json"}


@asynccontextmanager
async def serving(pool: FakeInspector) -> AsyncIterator[str]:
    settings = ApiSettings(port=0)
    app = create_app(pool, Metrics(), version="1", allowed_hosts=hosts_of(settings.host, ()))
    server = ApiServer(lambda: app, settings)
    server.bind()
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.run())
            yield server.url
            task.cancel()
    finally:
        server.close()


async def test_request_under_way_is_answered_before_the_server_stops():
    pool = FakeInspector()
    started, released = asyncio.Event(), asyncio.Event()

    async def slow_logs(key, *, lines):
        started.set()
        await released.wait()
        return {"w": ("late",)}

    pool.logs = slow_logs
    async with httpx.AsyncClient(timeout=PATIENCE) as client, asyncio.TaskGroup() as group, serving(pool) as url:
        request = group.create_task(client.get(f"{url}/v1/groups/k/logs"))
        await started.wait()
        asyncio.get_running_loop().call_later(0.05, released.set)
    assert request.result().json()["workers"] == {"w": ["late"]}


async def test_port_that_is_taken_is_reported_and_free_after_the_stop():
    async with serving(FakeInspector()) as url:
        port = httpx.URL(url).port
        assert port is not None
        with pytest.raises(PortTakenError, match=str(port)):
            bind_socket("127.0.0.1", port)
    bind_socket("127.0.0.1", port).close()


def test_address_of_another_host_is_reported():
    with pytest.raises(ConfigurationError, match=r"api\.host"):
        bind_socket("192.0.2.1", 0)

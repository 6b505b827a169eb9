"""Retries in a managed pool, with a daemon and workers of their own processes, as a user sets them up and sees them."""

import asyncio

import pytest
from daemon_process import WORKER, DaemonProcess
from managed_callers import apply, managed

from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.retries import ATTEMPTS_HEADER
from tests.connections import connected

APP = "tests.integration.flaky_app:app"
RETRY = {"codes": [503], "max_attempts": 3, "delays": ["100ms", "5s"]}
TEXT = "FROM /messages/* INTO $upstream"


async def waiting(daemon: DaemonProcess, delay_ms: int) -> int:
    """How many requests wait for so long."""
    async with connected(daemon.amqp_uri) as connection:
        channel = await connection.channel()
        return (await channel.declare_queue(PoolNames(daemon.pool).retry_queue(delay_ms), passive=True)).ready


@pytest.mark.proves("managed/request-fails-route-retries")
async def test_failed_requests_are_tried_again_as_their_route_says(make_daemon, tmp_path):
    """Also while no daemon runs, and as long as the caller does not forbid it."""
    daemon = managed(make_daemon, driver={"options": {"command": [WORKER, APP]}})
    await daemon.start()
    apply(daemon, tmp_path, {"all": {"route": TEXT, "priority": 2, "retry": RETRY}})
    async with daemon.client(default_timeout=120.0) as client:
        reply = await client.call("k", "/flaky", {"failures": 1})
        assert (reply.json()["attempt"], reply.headers[ATTEMPTS_HEADER]) == (2, 2)
        headers = {"x-queue-retry-5xx": "0"}
        forbidden = await client.call("k", "/flaky", {"failures": 1}, headers=headers, raise_on_error=False)
        assert (forbidden.code, ATTEMPTS_HEADER in forbidden.headers) == (503, False)
        call = asyncio.create_task(client.call("k", "/flaky", {"failures": 2}))
        while not call.done() and not await waiting(daemon, 5000):
            await asyncio.sleep(0.05)  # until it waits for its third attempt
        daemon.kill()
        assert (await call).json() == {"attempt": 3, "duplicate": False}

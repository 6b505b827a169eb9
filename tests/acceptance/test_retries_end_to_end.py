"""Retries in a managed pool, with a daemon and workers of their own processes, as a user sets them up and sees them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon_process import PATIENCE, DaemonProcess, MakeDaemon, until

from osrdyne.amqp import Channel, ConnectionOptions, connect
from osrdyne.client import AsyncClient, RequestCancelledError
from osrdyne.protocol.names import PoolNames, QueueName
from osrdyne.protocol.retries import ATTEMPTS_HEADER

APP = "tests.integration.flaky_app:app"
RETRY = {"codes": [503], "max_attempts": 3, "delays": ["100ms", "5s"]}
TEXT = "FROM /messages/* INTO $upstream"
LONG_MS = 300_000
"""A wait longer than a test: it ends the wait itself."""


def apply(daemon: DaemonProcess, directory: Path, route: object) -> None:
    manifest = directory / "manifest.json"
    manifest.write_text(json.dumps({"routes": {"all": route}}))
    done = daemon.osrdyne("routes", "apply", str(manifest), "--author", "test")
    assert done.returncode == 0, done.stderr


@asynccontextmanager
async def channel_of(daemon: DaemonProcess) -> AsyncIterator[Channel]:
    connection = await connect(ConnectionOptions(uri=daemon.amqp_uri, name="osrdyne acceptance test"))
    try:
        yield await connection.channel()
    finally:
        await connection.close()


async def waiting(daemon: DaemonProcess, delay_ms: int) -> int:
    """How many requests wait for so long."""
    async with channel_of(daemon) as channel:
        return (await channel.declare_queue(PoolNames(daemon.pool).retry_queue(delay_ms), passive=True)).ready


async def end_wait(channel: Channel, queue: QueueName) -> None:
    """Have RabbitMQ send the request that waits back, as it does when its time is over: by dead-lettering."""
    async with asyncio.timeout(PATIENCE):
        delivery = await (await channel.consume(queue)).get()
        await delivery.reject(requeue=False)


@pytest.mark.proves("managed/request-fails-route-retries")
async def test_failed_requests_are_tried_again_as_their_route_says(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Also while no daemon runs, and as long as the caller does not forbid it."""
    command = [str(Path(sys.executable).with_name("osrdyne-worker")), APP]
    daemon = make_daemon(driver={"options": {"command": command}})
    daemon.write_settings(pool={"kind": "managed"})
    await daemon.start()
    apply(daemon, tmp_path, {"route": TEXT, "priority": 2, "retry": RETRY})
    assert "tried again: 3 times in all, after 0.1 s, then 5 s." in daemon.osrdyne("explain", "k", "/flaky").stdout
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


async def cancel_what_waits(client: AsyncClient, daemon: DaemonProcess, gate: Path) -> None:
    """Cancel the request that waits, and then one that runs: its answer shows that the daemon has seen to both."""
    running = asyncio.create_task(client.call("k", "/wait", {"file": str(gate)}, correlation_id="runs"))
    await daemon.until_group("k", lambda group: group["workers"][0]["state"] == "busy", "it is busy")
    assert await client.cancel("waits")
    assert await client.cancel("runs")
    with pytest.raises(RequestCancelledError):
        await running


@pytest.mark.proves("managed/worker-ends-request-tried")
async def test_request_cancelled_while_it_waits_is_not_tried_by_the_successor_of_a_killed_worker(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """The worker that was there at the cancel knows of it, and takes that with it."""
    daemon = make_daemon()
    daemon.write_settings(pool={"kind": "managed"})
    await daemon.start()
    retry = {"codes": [503], "max_attempts": 2, "delays": [f"{LONG_MS}ms"]}
    apply(daemon, tmp_path, {"route": TEXT, "retry": retry})
    async with daemon.client(default_timeout=2 * LONG_MS / 1000) as client:
        call = asyncio.create_task(client.call("k", "/flaky", {"failures": 1}, correlation_id="waits"))
        await until(lambda: waiting(daemon, LONG_MS), "the request waits for its second attempt")
        await cancel_what_waits(client, daemon, tmp_path / "gate")
        [killed] = daemon.workers()
        os.kill(killed.pid, signal.SIGKILL)

        def notices() -> list[dict[str, Any]]:
            events = daemon.events("cancel sent to a worker", correlation_id="waits")
            return [event for event in events if event["worker"] != killed.worker_id]

        await until(notices, "its successor is notified of the cancel")
        async with channel_of(daemon) as channel:
            await end_wait(channel, PoolNames(daemon.pool).retry_queue(LONG_MS))
            with pytest.raises(RequestCancelledError) as caught:
                await call
    assert caught.value.reply is not None
    assert caught.value.reply.worker_id == notices()[0]["worker"]

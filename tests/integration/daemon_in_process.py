"""A daemon inside the test's own process, with real worker processes that echo."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import (
    ApiSettings,
    BrokerSettings,
    DriverSettings,
    LifecycleSettings,
    PoolSettings,
    Settings,
    WorkerSettings,
)
from osrdyne.daemon.daemon import Daemon
from osrdyne.daemon.term import StopRequest
from osrdyne.testing.fakes.verbs import LeaderVerbs
from tests.integration.broker_api import http_client

ROOT = Path(__file__).parents[2]
PATIENCE = 150.0
"""Seconds for anything that must happen; a test that needs them has failed."""


def echo_settings(broker: BrokerSettings, pool: str, directory: Path) -> Settings:
    """Short delays, and everything that is written stays below `directory`."""
    worker = Path(sys.executable).with_name("osrdyne-worker")
    options = {
        "command": [str(worker), "workers.examples.echo:app"],
        "cwd": str(ROOT),
        "state_directory": str(directory / "state"),
        "log_directory": str(directory / "logs"),
    }
    return Settings(
        broker=broker,
        pool=PoolSettings(id=pool),
        driver=DriverSettings(name="subprocess", options=options),
        worker=WorkerSettings(app="workers.examples.echo:app", stop_grace=5.0),
        lifecycle=LifecycleSettings(settle_delay=1.0, stop_delay=1.0),
        api=ApiSettings(port=0),
    )


def managed_settings(broker: BrokerSettings, pool: str, directory: Path, /, **changes: Any) -> Settings:
    """A managed pool that starts no process: the test plays the workers."""
    managed = {"pool": PoolSettings(id=pool, kind="managed"), "driver": DriverSettings(name="noop")}
    return echo_settings(broker, pool, directory).model_copy(update=managed | changes)


class LeaderOf(LeaderVerbs):
    """The verbs of tests for a daemon that leads."""

    def __init__(self, daemon: Daemon) -> None:
        assert daemon.term is not None
        self.term = daemon.term


@asynccontextmanager
async def running_daemon(
    settings: Settings, *, leading: bool = True, stop_workers: bool = True
) -> AsyncIterator[Daemon]:
    """A daemon that leads, or at least tries to; it ends in order."""
    daemon = Daemon(settings, clock=SystemClock())
    stop = StopRequest(asyncio.Event(), stop_workers=stop_workers)
    async with asyncio.TaskGroup() as group:
        group.create_task(daemon.serve(stop), name="daemon")
        try:
            if leading:
                async with asyncio.timeout(PATIENCE):
                    await daemon.wait_leading()
            yield daemon
        finally:
            stop.requested.set()


def api_of(daemon: Daemon, **options: Any) -> httpx.AsyncClient:
    """A client of the daemon's HTTP API."""
    return http_client(f"http://127.0.0.1:{daemon.api.port}", **options)


async def group_of(daemon: Daemon, key: str) -> dict[str, Any]:
    """A group in the daemon's HTTP API."""
    async with api_of(daemon) as http:
        answer: dict[str, Any] = (await http.get("/v1/group", params={"key": key})).json()
        return answer


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """The first true value of `condition`."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not (value := await condition()):
                await asyncio.sleep(0.05)
            return value
    except TimeoutError:
        raise AssertionError(f"this did not happen within {PATIENCE:g} s: {what}") from None

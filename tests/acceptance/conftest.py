"""Daemons for tests: real processes, that end with the test and have logged no traceback."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, MakeDaemon
from durable_caller import DurableCaller, durable_caller
from own_home import own_home

from osrdyne.config.models import BrokerSettings


@pytest.fixture(scope="session", autouse=True)
def all_start_processes(processes: None) -> None:
    """A daemon, its workers and commands."""


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose home is empty."""
    return own_home(tmp_path)


@pytest.fixture
async def make_daemon(broker_settings: BrokerSettings, pool_id: str, tmp_path: Path) -> AsyncIterator[MakeDaemon]:
    """Makes a daemon of the test's pool, with these settings over short delays; the test starts it."""
    daemons: list[DaemonProcess] = []
    numbers = itertools.count()

    def make(
        *,
        amqp_uri: str | None = None,
        management_uri: str | None = None,
        pool: str | None = None,
        launcher: Sequence[str] = (),
        **settings: Any,
    ) -> DaemonProcess:
        directory = tmp_path / f"daemon-{next(numbers)}"
        directory.mkdir()
        daemon = DaemonProcess(
            directory,
            amqp_uri=amqp_uri or broker_settings.uri.get_secret_value(),
            management_uri=management_uri or broker_settings.effective_management_uri(),
            pool=pool or pool_id,
            settings=settings,
            launcher=launcher,
        )
        daemons.append(daemon)
        return daemon

    yield make
    # All daemons first: one that lives would start the workers of another again.
    for daemon in daemons:
        if daemon.is_running:
            daemon.kill()
    for daemon in daemons:
        await daemon.close()
    for daemon in daemons:
        assert "Traceback" not in daemon.log()


@pytest.fixture
async def caller(broker_settings: BrokerSettings, pool_id: str) -> AsyncIterator[DurableCaller]:
    async with durable_caller(broker_settings.uri.get_secret_value(), pool_id) as connected:
        yield connected

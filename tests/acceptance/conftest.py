"""Daemons for tests: real processes, that end with the test and have logged no traceback."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from daemon_process import DaemonProcess, MakeDaemon
from durable_caller import durable_caller
from managed_callers import answers_of
from own_home import own_home

from osrdyne.config.models import BrokerSettings


@pytest.fixture(scope="session", autouse=True)
def all_start_processes(processes):
    """A daemon, its workers and commands."""


@pytest.fixture
def home(tmp_path):
    """The environment of a user whose home is empty."""
    return own_home(tmp_path)


@asynccontextmanager
async def daemons(broker_settings: BrokerSettings, pool_id: str, directory: Path) -> AsyncIterator[MakeDaemon]:
    """Ends the daemons that it has made with all their workers; no log has a traceback then."""
    made: list[DaemonProcess] = []

    def make(
        *,
        amqp_uri: str | None = None,
        management_uri: str | None = None,
        pool: str | None = None,
        launcher: Sequence[str] = (),
        **settings: Any,
    ) -> DaemonProcess:
        own = directory / f"daemon-{len(made)}"
        own.mkdir()
        daemon = DaemonProcess(
            own,
            amqp_uri=amqp_uri or broker_settings.uri.get_secret_value(),
            management_uri=management_uri or broker_settings.effective_management_uri(),
            pool=pool or pool_id,
            settings=settings,
            launcher=launcher,
        )
        made.append(daemon)
        return daemon

    yield make
    # All daemons first: one that lives would start the workers of another again.
    for daemon in made:
        if daemon.is_running:
            daemon.kill()
    for daemon in made:
        await daemon.close()
    for daemon in made:
        assert "Traceback" not in daemon.log()


@pytest.fixture
async def make_daemon(broker_settings, pool_id, tmp_path):
    """Makes a daemon of the test's pool, with these settings over short delays; the test starts it."""
    async with daemons(broker_settings, pool_id, tmp_path) as make:
        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_daemon(request, broker_settings, tmp_path_factory):
    """The daemon of all tests of a module, with its `SETTINGS`, in a pool of its own. Each test has its own keys."""
    directory = tmp_path_factory.mktemp("shared")
    async with daemons(broker_settings, f"t{secrets.token_hex(6)}", directory) as make:
        daemon = make(**request.module.SETTINGS)
        await daemon.start()
        yield daemon


@pytest.fixture
async def shared_caller(shared_daemon):
    async with durable_caller(shared_daemon.amqp_uri, shared_daemon.pool) as connected:
        yield connected


@pytest.fixture
async def caller(broker_settings, pool_id):
    async with durable_caller(broker_settings.uri.get_secret_value(), pool_id) as connected:
        yield connected


@pytest.fixture
async def answers(broker_settings, pool_id):
    async with answers_of(broker_settings.uri.get_secret_value(), pool_id) as collected:
        yield collected

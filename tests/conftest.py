"""Fixtures for every folder: one real RabbitMQ for the whole run, a virtual host of its own for each module, and a pool
of its own for each test.

`OSRDYNE_TEST_AMQP_URI` and `OSRDYNE_TEST_MANAGEMENT_URI` (set both) run the same tests against another RabbitMQ.
A missing RabbitMQ fails the tests that need it; nothing is skipped.

The report of a failed test holds what its process logged, and the ends of the log files below its `tmp_path`.
"""

import asyncio
import gc
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httpx
import pytest
import structlog
from hypothesis import settings
from log_tails import log_tails
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.logs import configure_events

# Before anything imports these suites.
pytest.register_assert_rewrite(
    "osrdyne.testing.driver_conformance", "osrdyne.testing.pooled_conformance", "remote_files"
)

pytest_plugins = [
    "plugins.tiers",
    "plugins.durations",
    "plugins.reruns",
    "plugins.no_skips",
    "plugins.failures_at_once",
    "plugins.shared_rabbitmq",
    "plugins.another_rabbitmq",
    "postgresql_server",
    "spark_fixtures",
]

# Write compiled modules even where the environment turns that off: a run starts hundreds of processes
# that import the same modules, and compiling the tests takes longer than most of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Property tests are judged by their result, not by the load of the machine. `make test-all` tries more examples than
# the run of each change: it takes the profile `thorough`.
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A shell that runs the tests in the background has SIGINT ignored, and so would all their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

PATIENCE = 120.0
"""Seconds for one answer of RabbitMQ."""


class Broker(Protocol):
    """What tests know of the RabbitMQ they run against. Tests that stop it bring an `EmbeddedBroker` of their own."""

    @property
    def amqp_uri(self) -> str: ...

    @property
    def management_uri(self) -> str: ...


@dataclass(frozen=True)
class ExternalBroker:
    amqp_uri: str = field(repr=False)
    management_uri: str = field(repr=False)


def run_apart(coroutine: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function in a loop and a thread of its own, whatever loop the tests use."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(lambda: asyncio.run(coroutine())).result()


@pytest.fixture(scope="session", autouse=True)
def own_runtime_directory():
    """The Unix sockets of the daemons of this run are in a directory of their own, with a short path."""
    with tempfile.TemporaryDirectory(prefix="osr-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


@pytest.fixture(autouse=True)
def logs_as_before():
    """A command that a test runs in this process sets the level of its logs, and the next test may look at warnings."""
    if not structlog.is_configured():
        configure_events("warning", as_json=False)
    before = structlog.get_config()
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)


@pytest.fixture(autouse=True)
def events_in_reports():
    """Log everything to standard error, which pytest shows of a failed test."""
    configure_events("debug", as_json=False)
    yield
    configure_events("warning", as_json=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    # Modules and collected tests live as long as the run: the garbage collector would go through all of them again and
    # again, which takes a fifth of the time of the unit tests.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    # pytest parses source code here. What the garbage collector ends meanwhile may do so too, which Python 3.11 takes
    # badly (gh-106905): it would end the whole run, and with it the reports of all failures.
    gc.disable()
    try:
        report = yield
    finally:
        gc.enable()
    directory = (getattr(item, "funcargs", None) or {}).get("tmp_path")
    if report.failed and isinstance(directory, Path):
        report.sections.extend((f"end of {name}", tail) for name, tail in log_tails(directory))
    return report


@pytest.fixture(scope="session")
def rabbitmq(request):
    """The RabbitMQ of the run."""
    given = [os.environ.get(f"OSRDYNE_TEST_{name}_URI") for name in ("AMQP", "MANAGEMENT")]
    plugin = request.config.pluginmanager.get_plugin("plugins.shared_rabbitmq")
    shared = given if all(given) else plugin.addresses(request.config)
    if shared is not None:
        yield ExternalBroker(*map(str, shared))
        return
    embedded = EmbeddedBroker()
    try:
        run_apart(embedded.start)
        yield embedded
    finally:
        run_apart(embedded.close)


@pytest.fixture(scope="module")
def broker(rabbitmq):
    """A virtual host of the module's own, with the user of the run. It is deleted with all that tests leave in it."""
    name = f"tests-{secrets.token_hex(6)}"
    user = unquote(urlsplit(rabbitmq.management_uri).username or "guest")
    with httpx.Client(base_url=rabbitmq.management_uri, trust_env=False, verify=False, timeout=PATIENCE) as client:
        client.put(f"/api/vhosts/{name}").raise_for_status()
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        client.put(f"/api/permissions/{name}/{quote(user, safe='')}", json=everything).raise_for_status()
        address = urlsplit(rabbitmq.amqp_uri)._replace(path=f"/{name}")
        yield ExternalBroker(urlunsplit(address), rabbitmq.management_uri)
        client.delete(f"/api/vhosts/{name}").raise_for_status()


@pytest.fixture(scope="module")
def broker_settings(broker):
    """With limits that no machine is too slow for: a daemon that shares its event loop with a test keeps its lead."""
    return BrokerSettings(
        uri=SecretStr(broker.amqp_uri),
        management_uri=SecretStr(broker.management_uri),
        leader_heartbeat=30.0,
        connect_timeout=PATIENCE,
        rpc_timeout=PATIENCE,
        management_timeout=PATIENCE,
    )


@pytest.fixture
def pool_id(broker):
    """A fresh pool id. Its global parameters, which belong to no virtual host, are deleted after the test."""
    pool = f"t{secrets.token_hex(6)}"
    yield pool
    with httpx.Client(base_url=broker.management_uri, trust_env=False, verify=False, timeout=PATIENCE) as client:
        for parameter in client.get("/api/global-parameters").raise_for_status().json():
            if parameter["name"].startswith(f"osrdyne-{pool}"):
                client.delete(f"/api/global-parameters/{quote(parameter['name'], safe='')}")


@pytest.fixture
async def management(broker_settings):
    async with ManagementClient(broker_settings) as client:
        yield client


@pytest.fixture
async def connection(broker):
    """A plain connection of the test's own."""
    options = amqp.ConnectionOptions(
        uri=broker.amqp_uri, name="osrdyne test", connect_timeout=PATIENCE, rpc_timeout=PATIENCE
    )
    opened = await amqp.connect(options)
    yield opened
    await opened.close()


@pytest.fixture
async def channel(connection):
    """A channel with publisher confirms."""
    return await connection.channel(confirms=True)

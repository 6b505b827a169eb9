"""What code in a worker can find of the worker's credentials, and the daemon's warning where they are too powerful."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from pydantic import SecretStr

from osrdyne.broker.doctor.run import run_broker_checks
from osrdyne.broker.management.credentials import user_prefix
from osrdyne.client import AsyncClient
from osrdyne.config.models import BrokerSettings, DriverSettings, Settings
from osrdyne.daemon.daemon import Daemon
from osrdyne.findings import Finding
from osrdyne.protocol.uri import with_user
from tests.integration.daemon_in_process import PATIENCE, echo_settings, running_daemon, until
from tests.integration.worker_process import stage

pytestmark = pytest.mark.usefixtures("processes")

KEY = "infra=42"


@pytest.fixture
async def settings(broker_settings, management, pool_id, tmp_path):
    """A daemon as `osrdyne dev` runs it: each worker has a user of its own."""
    settings = echo_settings(broker_settings.model_copy(update={"scoped_credentials": True}), pool_id, tmp_path)
    worker = Path(sys.executable).with_name("osrdyne-worker")
    options = {**settings.driver.options, "command": [str(worker), "tests.security.seeker_app:app"]}
    yield settings.model_copy(update={"driver": DriverSettings(name="subprocess", options=options)})
    for user in await management.list_users(f"osrdyne-{pool_id}-"):
        await management.delete_user(user)


@asynccontextmanager
async def client_of(settings: Settings) -> AsyncIterator[AsyncClient]:
    uri = settings.broker.effective_uri()
    async with AsyncClient(uri, settings.pool.id, name="osrdyne test", default_timeout=PATIENCE) as client:
        yield client


async def test_handler_finds_the_credentials_nowhere_and_the_worker_reconnects_with_them(
    settings, management, broker_settings, monkeypatch
):
    monkeypatch.setenv("CLOUD_PASSWORD", "of-the-daemon")
    prefix = user_prefix(settings.pool.id, management.vhost)
    async with running_daemon(settings), client_of(settings) as client:
        pid = (await client.call(KEY, "/who")).json()
        [user] = await management.list_users(prefix)
        assert (await client.call(KEY, "/seek", user.encode())).json() == []
        assert (await client.call(KEY, "/seek", b"of-the-daemon")).json() == []
        assert (await client.call(KEY, "/seek", b"OSRDYNE_SLOT")).json() != []  # it does see what there is
        await cut_connection(broker_settings, user)
        assert (await client.call(KEY, "/who", idempotent=True)).json() == pid


async def cut_connection(broker: BrokerSettings, user: str) -> None:
    async with httpx.AsyncClient(
        base_url=broker.effective_management_uri(), trust_env=False, verify=False, timeout=PATIENCE
    ) as http:

        async def find() -> list[str]:
            listed = (await http.get("/api/connections")).raise_for_status().json()
            return [connection["name"] for connection in listed if connection.get("user") == user]

        for name in await until(find, "RabbitMQ lists the connection"):
            assert (await http.delete(f"/api/connections/{quote(name, safe='')}")).status_code in {204, 404}


async def test_worker_started_by_hand_leaves_no_credentials_in_its_environment(broker, pool_id):
    """`WORKER_AMQP_URI` itself, as `osrdyne groups env` and Kubernetes give it."""
    seeker = "tests.security.seeker_app:app"
    async with stage(broker.amqp_uri, pool_id) as pool, AsyncClient(broker.amqp_uri, pool_id) as client:
        worker = await pool.start(app=seeker, variables={"WORKER_AMQP_URI_FILE": ""})
        assert (await client.call(pool.key, "/who", timeout=PATIENCE)).json() == worker.process.pid
        assert (await client.call(pool.key, "/seek", pool.uri.encode(), timeout=PATIENCE)).json() == []


@pytest.mark.nightly
async def test_administrator_in_workers_is_reported_by_log_status_and_doctor(settings, broker_settings, capfd):
    shared = settings.model_copy(update={"broker": broker_settings})
    async with running_daemon(shared) as daemon:
        component = await worker_credentials(daemon)
        assert component is not None
        assert (component["ok"], component["fatal"]) == (False, False)
        assert "broker.scoped_credentials" in component["detail"]
    assert "broker.scoped_credentials" in capfd.readouterr().err
    finding = await finding_about_credentials(shared)
    assert (finding.ok, finding.fatal) == (False, False)
    assert "broker.scoped_credentials" in (finding.remedy or "")


@pytest.mark.parametrize("user", ["of each worker", "without tags"])
async def test_credentials_without_administration_are_reported_as_fine(
    settings, broker_settings, management, pool_id, user
):
    if user == "without tags":
        name = f"osrdyne-{pool_id}-workers"
        await management.put_user(name, password="secret")
        worker_uri = SecretStr(with_user(broker_settings.effective_uri(), name, "secret"))
        limited = broker_settings.model_copy(update={"worker_uri": worker_uri})
        settings = settings.model_copy(update={"broker": limited})
    async with running_daemon(settings) as daemon:
        assert await worker_credentials(daemon) is None
    assert (await finding_about_credentials(settings)).ok


async def worker_credentials(daemon: Daemon) -> dict[str, object] | None:
    base = f"http://127.0.0.1:{daemon.api.port}"
    async with httpx.AsyncClient(base_url=base, trust_env=False, verify=False, timeout=PATIENCE) as http:
        answer = await http.get("/ready")
    assert answer.status_code == 200
    components = [one for one in answer.json()["components"] if one["name"] == "worker credentials"]
    return components[0] if components else None


async def finding_about_credentials(settings: Settings) -> Finding:
    async with asyncio.timeout(PATIENCE):
        return next(one for one in await run_broker_checks(settings) if one.subject == "worker credentials")

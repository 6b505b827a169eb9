"""Workers of a real daemon with users of their own: everything works, and users come and go with the workers."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from broker_api import close_connections, until
from daemon_in_process import PATIENCE, echo_settings, group_of, running_daemon
from pydantic import SecretStr

from osrdyne.broker.doctor.run import run_broker_checks
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import user_prefix
from osrdyne.client import AsyncClient, RequestCancelledError, StartFailedError
from osrdyne.config.models import DriverSettings, Settings
from osrdyne.protocol.uri import with_user

pytestmark = pytest.mark.usefixtures("processes")

KEY = "infra=42,timetable=24"


@pytest.fixture
async def settings(broker_settings, management, pool_id, tmp_path):
    yield echo_settings(broker_settings.model_copy(update={"scoped_credentials": True}), pool_id, tmp_path)
    for user in await management.list_users(f"osrdyne-{pool_id}-"):
        await management.delete_user(user)


async def worker_ids(management: ManagementClient, pool: str) -> list[str]:
    """The workers that have a user."""
    prefix = user_prefix(pool, management.vhost)
    return [user.removeprefix(prefix) for user in await management.list_users(prefix)]


@asynccontextmanager
async def client_of(settings: Settings) -> AsyncIterator[AsyncClient]:
    uri = settings.broker.effective_uri()
    async with AsyncClient(uri, settings.pool.id, name="osrdyne test", default_timeout=PATIENCE) as client:
        yield client


async def test_workers_answer_report_and_hear_as_users_of_their_own_that_go_with_them(settings, management):
    async with running_daemon(settings) as daemon, client_of(settings) as client:
        first = (await client.call(KEY, "/info")).json()
        assert await worker_ids(management, settings.pool.id) == [first["worker_id"]]

        async def reported():
            return (await group_of(daemon, KEY))["workers"][0]["state"] in {"ready", "idle"}

        await until(reported)
        call = asyncio.create_task(client.call(KEY, "/sleep", {"seconds": PATIENCE}, correlation_id="wanted"))
        while not call.done():
            await client.cancel("wanted")
            await asyncio.wait({call}, timeout=0.2)
        assert isinstance(call.exception(), RequestCancelledError)  # by way of a control message

        os.kill(first["pid"], signal.SIGKILL)
        second = (await client.call(KEY, "/info", idempotent=True)).json()
        assert second["worker_id"] != first["worker_id"]
        await until(lambda: worker_ids(management, settings.pool.id), equals=[second["worker_id"]])
    assert await worker_ids(management, settings.pool.id) == []  # the daemon has stopped its workers


@pytest.mark.nightly
async def test_worker_whose_user_was_removed_is_replaced(settings, management):
    worker = settings.worker.model_copy(update={"queue_missing_timeout": 1.0})
    async with running_daemon(settings.model_copy(update={"worker": worker})), client_of(settings) as client:
        first = (await client.call(KEY, "/info")).json()
        await management.delete_user(f"{user_prefix(settings.pool.id, management.vhost)}{first['worker_id']}")
        second = (await client.call(KEY, "/info", idempotent=True)).json()
        assert second["pid"] != first["pid"]


async def test_worker_outlives_its_controller_and_its_connection(settings, management, broker_settings):
    """A new leader makes no new password for a worker that runs: it can still log in."""
    uri = broker_settings.effective_management_uri()
    async with client_of(settings) as client:
        async with running_daemon(settings, stop_workers=False):
            first = (await client.call(KEY, "/info")).json()
        prefix = user_prefix(settings.pool.id, management.vhost)
        await management.put_user(f"{prefix}left-by-a-crash", password="x")
        async with running_daemon(settings):
            await close_connections(uri, user=f"{prefix}{first['worker_id']}")
            again = (await client.call(KEY, "/info", idempotent=True)).json()
            assert again["pid"] == first["pid"]

            await until(lambda: worker_ids(management, settings.pool.id), equals=[first["worker_id"]])


@pytest.fixture
async def policymaker(settings, management, pool_id):
    """The same with a user that may do everything but make users."""
    user = f"osrdyne-{pool_id}-policymaker"
    await management._request("PUT", "users", user, body={"password": "secret", "tags": "policymaker,monitoring"})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    await management._request("PUT", "permissions", management.vhost, user, body=everything)
    changed = {
        "uri": SecretStr(with_user(settings.broker.uri.get_secret_value(), user, "secret")),
        "management_uri": SecretStr(with_user(settings.broker.effective_management_uri(), user, "secret")),
    }
    return settings.model_copy(update={"broker": settings.broker.model_copy(update=changed)})


async def test_controller_that_may_not_make_users_tells_callers(policymaker):
    async with running_daemon(policymaker), client_of(policymaker) as client:
        with pytest.raises(StartFailedError):
            await client.call(KEY, "/echo", b"x", timeout=PATIENCE)
    findings = {finding.subject: finding for finding in await run_broker_checks(policymaker)}
    assert not findings["user tags"].ok


async def test_worker_that_knows_only_the_variables_of_the_reference_answers(settings):
    program = Path(__file__).parents[1] / "acceptance" / "plain_worker.py"
    options = settings.driver.options | {"command": [sys.executable, str(program)]}
    worker = settings.worker.model_copy(update={"environment": "reference"})
    changed = settings.model_copy(update={"driver": DriverSettings(options=options), "worker": worker})
    async with running_daemon(changed), client_of(changed) as client:
        answer = await client.call(KEY, "/anything", b"body")
    assert answer.body == f"{settings.pool.id}|{KEY}|/anything|body".encode()

"""A RabbitMQ user for clients (docs/how-to/create-client-users.md), and a managed pool that demands a user id."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import httpx
import pytest

from osrdyne import amqp
from osrdyne.amqp import Message
from osrdyne.broker.management.models import Permissions
from osrdyne.cli.main import execute
from osrdyne.client import AsyncClient, NoRouteError, RequestError, progress
from osrdyne.config.models import PoolSettings
from osrdyne.errors import BrokerAccessError
from osrdyne.protocol.names import DIRECT_REPLY_TO, Key, PoolNames
from osrdyne.protocol.progress import not_starting
from tests.integration.daemon_in_process import PATIENCE, echo_settings, running_daemon

pytestmark = pytest.mark.usefixtures("processes")

KEY = Key("infra=42")


Command = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def credentials(broker_settings, pool_id, monkeypatch, capsys, tmp_path):
    """`osrdyne credentials ACTION --client NAME`: its exit code, and what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSRDYNE__BROKER__URI", broker_settings.effective_uri())
    monkeypatch.setenv("OSRDYNE__BROKER__MANAGEMENT_URI", broker_settings.effective_management_uri())

    async def run(action, client):
        arguments = ["credentials", action, "--client", client, "--pool", pool_id]
        code = await asyncio.to_thread(execute, arguments, debug=False)
        return code, "".join(capsys.readouterr()).strip()

    return run


@pytest.fixture
async def client_uri(credentials, management, pool_id):
    user = f"client-of-{pool_id}"
    code, uri = await credentials("create", user)
    assert code == 0
    yield uri
    await management.delete_user(user)


async def test_credentials_are_created_once_and_only_those_of_clients_are_removed(credentials, management, pool_id):
    user, another = f"client-of-{pool_id}", f"another-of-{pool_id}"
    code, uri = await credentials("create", user)
    assert (code, uri.startswith("amqp")) == (0, True)
    code, said = await credentials("create", user)
    assert (code, repr(user) in said) == (2, True)
    await (await amqp.connect(amqp.ConnectionOptions(uri=uri, name="osrdyne test"))).close()  # the password is the same
    await management.put_user(another, password="secret")
    await management.put_permissions(another, Permissions(configure=".*", write=".*", read=".*"))
    code, said = await credentials("revoke", another)
    assert (code, repr(another) in said) == (2, True)
    assert await management.list_users(another) == [another]
    await management.delete_user(another)
    assert (await credentials("revoke", user))[0] == 0
    assert await management.list_users(user) == []
    for name in (user, "osrdyne-blue-x", "../guest"):
        assert (await credentials("revoke", name))[0] == 2


async def ask_for_progress(uri: str, names: PoolNames) -> None:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=uri, name="osrdyne test"))
    channel = await connection.channel()
    answers = await channel.consume(DIRECT_REPLY_TO, no_ack=True)
    await channel.publish(Message(reply_to=DIRECT_REPLY_TO), exchange=names.progress_exchange, routing_key=KEY)
    async with asyncio.timeout(PATIENCE):
        assert (await answers.get()).body == not_starting()
    await connection.close()


@pytest.mark.proves("requests/client-user-permission-ask")
async def test_user_without_the_permission_for_progress_can_call(
    client_uri, broker_settings, management, pool_id, tmp_path, monkeypatch
):
    """The permissions of a client user of an earlier version."""
    names = Permissions(configure="^$", write=f"^{pool_id}-(req|cancel)-xchg$", read="^$")
    await management.put_permissions(f"client-of-{pool_id}", names)
    refused = asyncio.Event()
    monkeypatch.setattr(progress, "log", SimpleNamespace(info=lambda *_, **__: refused.set()))
    async with (
        running_daemon(echo_settings(broker_settings, pool_id, tmp_path)),
        AsyncClient(client_uri, pool_id, default_timeout=PATIENCE) as client,
        asyncio.TaskGroup() as group,
    ):
        silent = group.create_task(client.call(KEY, "/sleep", {"seconds": 600}, on_starting=lambda _: None))
        async with asyncio.timeout(PATIENCE):
            await refused.wait()
        assert (await client.call("other", "/echo", b"x")).body == b"x"
        assert not silent.done()
        silent.cancel()


async def test_client_user_can_call_and_nothing_else(client_uri, broker_settings, pool_id, tmp_path):
    names = PoolNames(pool_id)
    async with (
        running_daemon(echo_settings(broker_settings, pool_id, tmp_path)),
        AsyncClient(client_uri, pool_id, default_timeout=PATIENCE) as client,
    ):
        assert (await client.call(KEY, "/echo", b"x")).body == b"x"
        await client.cancel("nothing")
        await ask_for_progress(client_uri, names)
        connection = await amqp.connect(amqp.ConnectionOptions(uri=client_uri, name="osrdyne test"))
        exchanges = ("", names.orphan_exchange, names.control_exchange, names.activity_exchange)
        for exchange in (*exchanges, names.dead_letter_exchange):
            channel = await connection.channel(confirms=True)
            with pytest.raises(BrokerAccessError):
                await channel.publish(Message(b"x"), exchange=exchange, routing_key=names.leader_queue)
        for queue in (names.request_queue(KEY), names.leader_queue, names.poison_queue):
            channel = await connection.channel()
            with pytest.raises(BrokerAccessError):
                await channel.get(queue)
        await connection.close()


async def test_route_that_demands_a_user_id_believes_no_other_client(client_uri, broker_settings, pool_id, tmp_path):
    """RabbitMQ verifies the property; a header of the same name is not taken for it."""
    user = f"client-of-{pool_id}"
    direct = echo_settings(broker_settings, pool_id, tmp_path)
    managed = direct.model_copy(update={"pool": PoolSettings(id=pool_id, kind="managed")})
    manifest = {"routes": {"known": f"FROM /messages/* WHERE {{$userId}} = '{user}' INTO $upstream"}}
    async with (
        running_daemon(managed) as daemon,
        AsyncClient(client_uri, pool_id, default_timeout=PATIENCE, user_id=user) as known,
        AsyncClient(client_uri, pool_id, default_timeout=PATIENCE) as silent,
        AsyncClient(client_uri, pool_id, default_timeout=PATIENCE, user_id="guest", reconnect=None) as liar,
    ):
        base = f"http://127.0.0.1:{daemon.api.port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, verify=False, timeout=PATIENCE) as http:
            (await http.put("/v1/routes", json=manifest, params={"author": "test"})).raise_for_status()
        assert (await known.call(KEY, "/echo", b"x")).body == b"x"
        with pytest.raises(NoRouteError):
            await silent.call(KEY, "/echo", b"x", headers={"$userId": user, "userId": user, "user-id": user})
        with pytest.raises(RequestError):
            await liar.call(KEY, "/echo", b"x")
        assert (await known.call(KEY, "/echo", b"y")).body == b"y"

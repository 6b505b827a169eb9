"""A RabbitMQ user for clients (docs/how-to/create-client-users.md), and a managed pool that demands a user id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from osrdyne import amqp
from osrdyne.amqp import Message
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import Permissions
from osrdyne.client import AsyncClient, NoRouteError, RequestError
from osrdyne.config.models import BrokerSettings, PoolSettings
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.uri import with_user
from tests.integration.daemon_in_process import PATIENCE, echo_settings, running_daemon

KEY = Key("infra=42")


@pytest.fixture
async def client_uri(broker_settings: BrokerSettings, management: ManagementClient, pool_id: str) -> AsyncIterator[str]:
    user = f"client-of-{pool_id}"
    await management.put_user(user, password="secret")
    names = Permissions(configure="^$", write=f"^{pool_id}-(req|cancel)-xchg$", read="^$")
    await management.put_permissions(user, names)
    yield with_user(broker_settings.effective_uri(), user, "secret")
    await management.delete_user(user)


async def test_client_user_can_call_and_nothing_else(
    client_uri: str, broker_settings: BrokerSettings, pool_id: str, tmp_path: Path
) -> None:
    names = PoolNames(pool_id)
    async with (
        running_daemon(echo_settings(broker_settings, pool_id, tmp_path)),
        AsyncClient(client_uri, pool_id, default_timeout=PATIENCE) as client,
    ):
        assert (await client.call(KEY, "/echo", b"x")).body == b"x"
        await client.cancel("nothing")
        connection = await amqp.connect(amqp.ConnectionOptions(uri=client_uri, name="osrdyne test"))
        exchanges = ("", names.orphan_exchange, names.control_exchange, names.activity_exchange)
        for exchange in (*exchanges, names.dead_letter_exchange):
            channel = await connection.channel(confirms=True)
            with pytest.raises(BrokerError, match="refused"):
                await channel.publish(Message(b"x"), exchange=exchange, routing_key=names.leader_queue)
        for queue in (names.request_queue(KEY), names.leader_queue, names.poison_queue):
            channel = await connection.channel()
            with pytest.raises(BrokerError, match="refused"):
                await channel.get(queue)
        await connection.close()


async def test_route_that_demands_a_user_id_believes_no_other_client(
    client_uri: str, broker_settings: BrokerSettings, pool_id: str, tmp_path: Path
) -> None:
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

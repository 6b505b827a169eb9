"""The HTTP API client against a real RabbitMQ."""

import asyncio
import secrets

import pytest
from broker_api import until
from pydantic import SecretStr

from osrdyne.amqp import ConnectionOptions, Message, connect
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.config.models import BrokerSettings
from osrdyne.errors import BrokerAccessError, BrokerError, BrokerUnavailableError

QUORUM = {"x-queue-type": "quorum"}


async def test_broker_user_and_nodes_are_described(management):
    overview = await management.overview()
    assert overview.version.is_supported
    assert overview.clock_offset is not None and abs(overview.clock_offset) < 60
    whoami = await management.whoami()
    assert whoami.user == management.user
    assert whoami.may_set_policies and whoami.may_monitor
    permissions = await management.permissions()
    assert permissions is not None and permissions.configure == ".*"
    while (node := (await management.nodes())[0]).files_limit is None:
        await asyncio.sleep(0.5)
    assert node.running and not node.memory_alarm and not node.disk_alarm
    assert node.files_limit > 0 and node.memory_limit


async def test_messages_and_connections_with_consumers_are_counted(pool_id, channel, broker_settings, management):
    queue = f"{pool_id}-req-a"
    assert await management.count_consuming_connections(queue) == 0
    await channel.declare_queue(queue, arguments=QUORUM)
    for _ in range(3):
        await channel.publish(Message(), exchange="", routing_key=queue)
    assert await channel.get(queue) is not None

    async def counts():
        return [(one.messages, one.ready, one.unacknowledged) for one in await management.list_queues(queue)]

    await until(counts, equals=[(3, 2, 1)])  # statistics are some seconds late
    other = await connect(ConnectionOptions(uri=broker_settings.effective_uri(), name="osrdyne test"))
    try:
        for one in (channel, channel, await other.channel()):
            await one.consume(queue, prefetch=1)
        await until(lambda: management.count_consuming_connections(queue), equals=2)
    finally:
        await other.close()


@pytest.mark.proves("broker/pool-more-500-queues")
async def test_listing_is_complete_while_queues_come_and_go(pool_id, channel, management):
    """It has many pages. A prefix is not a pattern."""
    prefix = f"{pool_id}-req-"
    assert await management.list_queues(prefix) == []
    lasting = {f"{prefix}b{number}" for number in range(40)}
    for name in lasting:
        await channel.declare_queue(name)
    listed = await management.list_queues(prefix, page_size=7)
    assert ({queue.name for queue in listed}, len(listed)) == (lasting, 40)
    assert await management.list_queues(f"{pool_id}-.eq") == []

    async def disturb():
        for number in range(5):
            await channel.declare_queue(f"{prefix}a{number}")
            await channel.delete_queue(f"{prefix}a{number}")

    disturbance = asyncio.create_task(disturb())
    listed = await management.list_queues(prefix, page_size=10)
    await disturbance
    assert lasting <= {queue.name for queue in listed}


async def test_global_parameters_are_kept_and_a_refused_policy_names_the_setting(pool_id, management):
    name = f"{pool_id}-manifest"
    assert await management.get_global_parameter(name) is None
    await management.put_global_parameter(name, {"pinned": ["é/%41"], "n": 1})
    assert await management.get_global_parameter(name) == {"pinned": ["é/%41"], "n": 1}
    with pytest.raises(BrokerError, match="no-such-setting"):
        await management.put_policy(PolicySpec(f"{pool_id}-req", "^$", "queues", {"no-such-setting": 1}))


async def test_a_wrong_password_and_the_amqp_port_are_refused(broker_settings):
    uri, amqp_uri = broker_settings.effective_management_uri(), broker_settings.uri.get_secret_value()
    user, secret = uri.partition("//")[2].partition(":")[0], secrets.token_hex(8)
    wrong = uri.replace(uri.partition("@")[0], f"http://{user}:{secret}")
    async with ManagementClient(BrokerSettings(uri=broker_settings.uri, management_uri=SecretStr(wrong))) as client:
        with pytest.raises(BrokerAccessError, match=user) as refused:
            await client.overview()
    assert secret not in str(refused.value)
    no_http = SecretStr(amqp_uri.replace("amqp://", "http://"))
    async with ManagementClient(BrokerSettings(uri=broker_settings.uri, management_uri=no_http)) as client:
        with pytest.raises(BrokerUnavailableError, match=r"broker\.management_uri"):
            await client.overview()

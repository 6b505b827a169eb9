"""Queues that another program deletes and declares again at once, as an import of definitions does (broker:
reattached-consumers): real RabbitMQ, which before 4.0 keeps their consumers and delivers nothing to them."""

import pytest
from daemon_in_process import echo_settings, running_daemon
from test_term import SOON, daemon_of, publish, settings_of, take

from osrdyne.broker.topology.declarations import Queue, QueueBinding, pool_topology, request_queue_arguments
from osrdyne.client import AsyncClient
from osrdyne.config.models import LifecycleSettings
from osrdyne.protocol.names import Key, PoolNames

pytestmark = pytest.mark.usefixtures("processes")

SELDOM = LifecycleSettings(topology_interval=3600.0, resync_interval=3600.0)


async def import_again(channel, queue, arguments, *bindings):
    await channel.begin_delete_queue(queue)
    await channel.declare_queue(queue, arguments=arguments)
    for exchange, key in bindings:
        await channel.bind_queue(queue, exchange, key)


OTHERS = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("dl", "activity", "cancel")]


@pytest.mark.parametrize("kind", ["orphan", *OTHERS])
@pytest.mark.proves("broker/controller-queue-declared-again")
async def test_new_keys_start_after_a_queue_of_the_controller_was_imported(broker_settings, pool_id, channel, kind):
    names, queue = PoolNames(pool_id), f"{pool_id}-{kind}"
    broker = broker_settings.model_copy(update={"leader_heartbeat": 3.0})
    declared = pool_topology(pool_id).declarations
    [arguments] = [one.arguments for one in declared if isinstance(one, Queue) and one.name == queue]
    bound = [one for one in declared if isinstance(one, QueueBinding) and one.queue == queue]
    async with daemon_of(settings_of(broker, pool_id, SELDOM)) as running:
        term = await running.leads()
        await import_again(channel, queue, arguments, *((one.exchange, one.routing_key) for one in bound))
        await running.leads(after=term)
        await publish(channel, names, Key("new"), b"1")
        assert await take(channel, names.request_queue(Key("new")), 1) == [b"1"]


@pytest.mark.proves("broker/request-queue-declared-again")
async def test_worker_serves_the_next_request_after_its_queue_was_imported(broker_settings, pool_id, channel, tmp_path):
    names, key = PoolNames(pool_id), Key("a")
    settings = echo_settings(broker_settings, pool_id, tmp_path).model_copy(update={"lifecycle": SELDOM})
    # Liveness and the comparison with RabbitMQ come too late for this test.
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update={"silence_timeout": 3600.0})})
    queue, binding = names.request_queue(key), (names.requests_exchange, key)
    async with running_daemon(settings), AsyncClient(broker_settings.uri.get_secret_value(), pool_id) as client:
        await client.call(key, "/echo", b"1", timeout=SOON)
        await import_again(channel, queue, request_queue_arguments(names, key), binding)
        assert (await client.call(key, "/echo", b"2", timeout=SOON)).body == b"2"

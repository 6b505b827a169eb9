"""The client when its connection dies: the outcome of calls under way, and what comes back by itself."""

from __future__ import annotations

import asyncio

import pytest
from broker_api import PATIENCE, close_connections, until
from client_responder import Responder, silence
from rabbitmqctl import rabbitmqctl

from osrdyne.aio.clock import Backoff
from osrdyne.client import AsyncClient, ConnectionLostError, ConnectionStatus, RequestTimeoutError
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.messages import Response
from tests.conftest import run_apart

pytestmark = pytest.mark.usefixtures("processes")

FAST = Backoff(initial=0.05, maximum=0.2)


@pytest.mark.proves("requests/client-loses-connection-during")
async def test_call_under_way_fails_with_unknown_outcome_or_is_sent_again_if_it_is_idempotent(broker, pool_id):
    answers = [[], [Response(body=b"after")], [], [Response(body=b"second time")]]
    responder = Responder(broker.amqp_uri, pool_id, answer=lambda _: answers.pop(0))
    client = AsyncClient(broker.amqp_uri, pool_id, name=f"{pool_id} client", reconnect=FAST)
    async with responder, client, asyncio.TaskGroup() as group:
        call = group.create_task(_outcome(client))
        await responder.requests.get()
        await close_connections(broker.management_uri, name=f"{pool_id} client")
        error = await call
        assert isinstance(error, ConnectionLostError) and error.retryable
        assert (await client.call("k", timeout=PATIENCE)).text == "after"
        await responder.requests.get()
        again = group.create_task(client.call("k", timeout=PATIENCE, idempotent=True))
        first = (await responder.requests.get()).properties
        await close_connections(broker.management_uri, name=f"{pool_id} client")
        second = (await responder.requests.get()).properties
        assert (await again).text == "second time"
    assert second.correlation_id == first.correlation_id
    assert second.headers["x-deadline"] == first.headers["x-deadline"]


async def _outcome(client: AsyncClient) -> Exception | None:
    try:
        await client.call("k", timeout=PATIENCE)
    except Exception as error:
        return error
    return None


async def test_without_reconnect_the_loss_is_final(broker, pool_id):
    async with (
        Responder(broker.amqp_uri, pool_id),
        AsyncClient(broker.amqp_uri, pool_id, name=f"{pool_id} client", reconnect=None) as client,
    ):
        await close_connections(broker.management_uri, name=f"{pool_id} client")
        await until(lambda: client.status is ConnectionStatus.CLOSED)
        with pytest.raises(BrokerUnavailableError):
            await client.call("k", timeout=PATIENCE)


@pytest.fixture(scope="module")
def own_broker():
    """A node of this module's own, to be stopped and started; each test leaves it running."""
    broker = EmbeddedBroker()
    try:
        run_apart(broker.start)
        yield broker
    finally:
        run_apart(broker.close)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_client_lives_through_a_restart_of_the_broker(own_broker, pool_id):
    client = AsyncClient(
        own_broker.amqp_uri, pool_id, reconnect=FAST, answer_slack=3600
    )  # what is not sent gets no answer
    async with client:
        async with Responder(own_broker.amqp_uri, pool_id, keep=True):
            assert (await client.call("k", timeout=PATIENCE)).ok
        await own_broker.stop()
        await until(lambda: client.status is ConnectionStatus.RECONNECTING)
        with pytest.raises(RequestTimeoutError, match="not sent") as raised:
            await client.call("k", timeout=0.2)
        assert not raised.value.sent
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(client.call("k", "", b"waited", timeout=240))
            await own_broker.start()
            async with Responder(own_broker.amqp_uri, pool_id):
                assert (await waiting).body == b"waited"


async def test_closing_ends_and_cancels_the_calls_under_way(broker, pool_id):
    async with Responder(broker.amqp_uri, pool_id, answer=silence) as responder, asyncio.TaskGroup() as group:
        async with AsyncClient(broker.amqp_uri, pool_id) as client:
            call = group.create_task(_outcome(client))
            await responder.requests.get()
        assert isinstance(await call, ConnectionLostError)
        assert (await responder.next_cancel()).routing_key == "k"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.proves("broker/memory-disk-alarm")
async def test_blocked_broker_is_reported_and_requests_wait_for_it(own_broker, pool_id):
    client = AsyncClient(own_broker.amqp_uri, pool_id, answer_slack=3600)  # what is not sent gets no answer
    async with (
        Responder(own_broker.amqp_uri, pool_id, consume=False) as responder,
        client,
        asyncio.TaskGroup() as group,
    ):
        await rabbitmqctl(own_broker, "set_vm_memory_high_watermark", "0")
        waiting = group.create_task(client.cast("k", "", b"waited", timeout=240))
        await until(lambda: client.status is ConnectionStatus.BLOCKED)
        with pytest.raises(RequestTimeoutError, match="alarm") as raised:
            await client.call("k", timeout=0.2)
        assert not raised.value.sent
        await rabbitmqctl(own_broker, "set_vm_memory_high_watermark", "0.4")
        await waiting
        delivery = await responder.channel.get(responder.queue)
    assert delivery is not None
    assert delivery.body == b"waited"

"""The asyncio client against real RabbitMQ: answers, keys, progress, cancelling, and what a lost connection costs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from broker_api import PATIENCE, close_connections, until
from client_responder import JOBS, Answer, Responder, echo, silence, with_progress

from osrdyne.aio.clock import Backoff
from osrdyne.client import (
    AsyncClient,
    ConnectionLostError,
    ConnectionStatus,
    InvalidRequestError,
    PoolNotFoundError,
    Reply,
    RequestQueueFullError,
    RequestRefusedError,
    RequestTimeoutError,
)
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.progress import JobProgress
from osrdyne.testing.fakes.amqp import delete_exchange

Served = tuple[Responder, AsyncClient]


@asynccontextmanager
async def serving(broker: EmbeddedBroker, pool: str, answer: Answer = echo, **options: Any) -> AsyncIterator[Served]:
    """A pool whose requests are answered so, and its client."""
    async with (
        Responder(broker.amqp_uri, pool, answer=answer) as responder,
        AsyncClient(broker.amqp_uri, pool, default_timeout=PATIENCE, **options) as client,
    ):
        yield responder, client


async def test_two_hundred_calls_in_flight_get_their_own_answers(broker, pool_id):
    async with serving(broker, pool_id) as (_, client):
        replies = await asyncio.gather(*(client.call("k", "/echo", {"é": number}) for number in range(200)))
    assert [reply.json() for reply in replies] == [{"é": number} for number in range(200)]
    assert {(reply.worker_id, reply.ok) for reply in replies} == {("echo", True)}


@pytest.mark.proves("requests/daemon-ever-run-pool")
async def test_client_goes_on_after_an_unknown_pool_and_a_bad_header(broker, pool_id):
    async with AsyncClient(broker.amqp_uri, pool_id) as client:
        with pytest.raises(PoolNotFoundError, match=pool_id):
            await client.call("k", timeout=PATIENCE)
        assert client.status is ConnectionStatus.CONNECTED
        async with Responder(broker.amqp_uri, pool_id):
            with pytest.raises(TypeError):  # AMQP cannot express it
                await client.call("k", headers={"bad": object()}, timeout=PATIENCE)
            assert (await client.call("k", timeout=PATIENCE)).ok


async def test_progress_reaches_callback_and_stream_before_the_answer(broker, pool_id):
    """That of jobs has a callback of its own. A callback that fails fails its call only."""
    seen: list[Reply] = []
    jobs: list[JobProgress] = []

    def fail(reply):
        raise LookupError("of the caller")

    async with serving(broker, pool_id, with_progress) as (responder, client):
        last = await client.call("k", on_progress=seen.append)
        assert ([reply.text for reply in seen], last.text) == (["0", "1", "2"], "last")
        replies = [(reply.text, reply.progress) async for reply in client.stream("k")]
        assert replies == [("0", True), ("1", True), ("2", True), ("last", False)]
        for on_progress in (None, seen.append):
            assert (await client.call("k", on_jobs=jobs.append, on_progress=on_progress)).text == "last"
        assert (jobs, len(seen)) == ([JOBS, JOBS], 6)
        with pytest.raises(LookupError, match="of the caller"):
            await client.call("k", on_progress=fail)
        assert (await responder.next_cancel()).routing_key == "k"
        assert (await client.call("k")).text == "last"


async def test_stream_left_early_and_cancelled_task_cancel_their_requests(broker, pool_id):
    def start(request: Request) -> list[Response]:
        return [Response(body=b"first", progress=True)]

    async with serving(broker, pool_id, start) as (responder, client):
        async with aclosing(client.stream("k")) as replies:
            assert (await anext(replies)).text == "first"
        cancels = [await responder.next_cancel()]
        requests = [await responder.requests.get()]
        call = asyncio.create_task(client.call("k"))
        requests.append(await responder.requests.get())
        call.cancel()
        cancels.append(await responder.next_cancel())
        assert not await client.cancel("nothing")
    assert [one.properties.correlation_id for one in cancels] == [one.properties.correlation_id for one in requests]
    assert call.cancelled()


async def test_no_answer_ends_in_a_timeout_of_the_clients_own(broker, pool_id):
    async with serving(broker, pool_id, silence, answer_slack=3600) as (_, client):
        with pytest.raises(RequestTimeoutError, match="no answer") as raised:
            await client.call("k", timeout=2.0, answer_slack=0.05)
        assert (raised.value.sent, client.in_flight) == (True, 0)


@pytest.mark.proves("races/request-delivered-twice-answered", "requests/same-answer-arrives-twice")
async def test_repeated_answer_is_ignored_and_counted(broker, pool_id):
    async with serving(broker, pool_id, lambda request: [*echo(request), *echo(request)]) as (_, client):
        for number in range(3):
            assert (await client.call("k", "", number, timeout=PATIENCE)).json() == number
    assert client.ignored_replies >= 2  # the last one may still be on its way


async def test_cancel_carries_the_same_address_as_the_request(broker, pool_id):
    async with serving(broker, pool_id, silence) as (responder, client), asyncio.TaskGroup() as group:
        call = group.create_task(client.call("k", correlation_id="mine", raise_on_error=False))
        request = (await responder.requests.get()).properties
        assert await client.cancel("mine")
        cancel = await responder.next_cancel()
        assert (cancel.properties.correlation_id, cancel.routing_key) == ("mine", "k")
        assert cancel.properties.reply_to == request.reply_to != "amq.rabbitmq.reply-to"
        with pytest.raises(InvalidRequestError, match="mine"):
            await client.call("k", correlation_id="mine")
        # A pool without a cancel exchange does not cost the calls under way.
        await delete_exchange(responder.channel, responder.names.cancel_exchange)
        with pytest.raises(PoolNotFoundError, match="cancel"):
            await client.cancel("mine")
        assert (client.in_flight, client.status) == (1, ConnectionStatus.CONNECTED)
        call.cancel()


async def test_full_queue_and_pool_without_any_refuse_the_request(broker, pool_id):
    full = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}
    responder = Responder(broker.amqp_uri, pool_id, queue_arguments=full, consume=False)
    async with responder, AsyncClient(broker.amqp_uri, pool_id) as client:
        await client.cast("k")
        with pytest.raises(RequestQueueFullError):
            await client.call("k", timeout=PATIENCE)
        with pytest.raises(RequestRefusedError):
            await client.call("of no queue", timeout=PATIENCE)


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


async def test_closing_ends_and_cancels_the_calls_under_way(broker, pool_id):
    async with Responder(broker.amqp_uri, pool_id, answer=silence) as responder, asyncio.TaskGroup() as group:
        async with AsyncClient(broker.amqp_uri, pool_id) as client:
            call = group.create_task(_outcome(client))
            await responder.requests.get()
        assert isinstance(await call, ConnectionLostError)
        assert (await responder.next_cancel()).routing_key == "k"

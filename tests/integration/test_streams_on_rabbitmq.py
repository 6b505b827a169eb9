"""Streamed answers through a real worker process and real RabbitMQ: credit, lost workers, clients that go away."""

import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from broker_api import until
from worker_process import PATIENCE, Stage, stage

from osrdyne import amqp
from osrdyne.broker.management.models import Permissions
from osrdyne.client import (
    ARROW_TYPE,
    AsyncClient,
    RequestExpiredError,
    RequestFailedError,
    RequestRefusedError,
    StreamInterruptedError,
)
from osrdyne.protocol.control import Command
from osrdyne.protocol.streams import DEFAULT_CREDIT, PART_BYTES
from osrdyne.protocol.uri import with_user

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.asyncio(loop_scope="module")]

APP = "tests.integration.streaming_app:app"
ROWS_OF_A_PART = PART_BYTES // 16 - 1000
"""Two columns of 8 bytes: a batch of these rows is a part of nearly the largest size."""


@asynccontextmanager
async def streaming(uri: str, pool: str) -> AsyncIterator[Stage]:
    async with stage(uri, pool, forked=True) as result:
        await result.channel.declare_exchange(result.names.credit_exchange, "direct")
        await result.channel.declare_exchange(result.names.cancel_exchange, "fanout")
        await result.channel.declare_queue(result.names.cancel_queue)
        await result.channel.bind_queue(result.names.cancel_queue, result.names.cancel_exchange)
        yield result


def client_of(pool: Stage) -> AsyncClient:
    return AsyncClient(pool.uri, pool.names.pool, default_timeout=PATIENCE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(broker):
    """One worker with one slot: a stream that waits for credit gives it back, and needs it again later."""
    async with streaming(broker.amqp_uri, f"t{secrets.token_hex(6)}") as result:
        await result.start(app=APP, runtime={"concurrency": 1})
        yield result


@pytest_asyncio.fixture(loop_scope="module")
async def client(pool):
    async with client_of(pool) as result:
        yield result


async def numbers(batches: Any) -> list[int]:
    return [number async for batch in batches for number in batch["number"].to_pylist()]


async def state(client: AsyncClient) -> dict[str, int]:
    found: dict[str, int] = (await client.call("k", "/state")).json()
    return found


async def yielded(client: AsyncClient) -> int:
    """How many batches the worker has yielded so far."""
    return (await state(client))["yielded"]


async def until_state(client: AsyncClient, **wanted: int) -> None:
    async def is_reached() -> bool:
        return wanted.items() <= (await state(client)).items()

    await until(is_reached)


@pytest.mark.parametrize("path", ["/rows", "/table"])
async def test_result_larger_than_a_message_reaches_the_client(pool, client, path):
    body = {"batches": 8, "rows": ROWS_OF_A_PART}
    assert await numbers(client.call_batches("k", path, body)) == list(range(8 * ROWS_OF_A_PART))
    plain = await client.call("k", path, body, accept=ARROW_TYPE)
    assert plain.arrow().num_rows == 10_000, "the default limit of an answer in one message"
    assert await numbers(client.call_batches("k", path, {"batches": 1, "rows": 3})) == [0, 1, 2]
    await until(pool.ready_requests, equals=0)


@pytest.mark.proves("requests/client-reads-streamed-answer")
async def test_client_without_credit_stops_the_worker_and_nothing_else(client):
    before = await yielded(client)
    batches = client.call_batches("k", "/rows", {"batches": 40})
    async with aclosing(batches):
        await anext(batches)
        await until_state(client, yielded=before + DEFAULT_CREDIT)  # answered beside the open stream
        assert await numbers(client.call_batches("k", "/rows", {"batches": 10})) == list(range(10_000))
        assert await yielded(client) == before + DEFAULT_CREDIT + 10
        assert await numbers(batches) == list(range(1000, 40_000))
    await until_state(client, open=0)


@pytest.mark.proves("requests/handler-fails-some-parts")
async def test_error_after_some_batches_reaches_the_caller(client):
    batches = client.call_batches("k", "/rows", {"batches": 10, "fail_after": 6})
    found = [(await anext(batches)).num_rows for _ in range(6)]
    with pytest.raises(RequestFailedError, match="failed after 6 batches") as caught:
        await anext(batches)
    assert (caught.value.code, found) == (503, [1000] * 6)


async def test_killed_worker_after_the_first_row_ends_the_call(broker, pool_id, tmp_path):
    """The rows of a second run may come in another order: the caller has to start over."""
    gate = tmp_path / "gate"
    async with streaming(broker.amqp_uri, pool_id) as pool, client_of(pool) as client:
        first = await pool.start(app=APP)
        batches = client.call_batches("k", "/rows", {"batches": 20, "gate": str(gate), "gate_at": 2})
        for _ in range(2):
            await anext(batches)
        first.signal(signal.SIGKILL)
        await first.wait()
        gate.touch()
        await pool.start(app=APP)
        with pytest.raises(StreamInterruptedError, match="started again"):
            await anext(batches)
        # And it is cancelled, so that the second worker need not finish it.
        cancel = (await until(lambda: pool.channel.get(pool.names.cancel_queue))).properties
        await pool.send_control(Command.CANCEL, correlation_id=cancel.correlation_id, reply_to=cancel.reply_to)
        await until_state(client, open=0)
        # RabbitMQ may not have read an acknowledgement of the killed worker.
        await until(pool.ready_requests, equals=0)


@pytest.mark.proves("requests/client-streamed-answer-goes")
async def test_client_that_goes_away_frees_the_worker(pool, client):
    before = await yielded(client)
    other = client_of(pool)
    await other.__aenter__()
    batches = other.call_batches("k", "/rows", {"batches": 1000})
    await anext(batches)
    await until_state(client, open=1, yielded=before + DEFAULT_CREDIT)
    await other.close()  # the cancel is not passed on: there is no controller
    await until_state(client, open=0, yielded=before + DEFAULT_CREDIT)
    await until(pool.ready_requests, equals=0)
    await batches.aclose()


async def test_cancel_and_deadline_end_a_stream(pool, client):
    batches = client.call_batches("k", "/rows", {"batches": 1000}, correlation_id="c")
    await anext(batches)
    await client.cancel("c")
    cancel = None
    while cancel is None or cancel.properties.correlation_id != "c":  # earlier tests have left some
        cancel = await pool.channel.get(pool.names.cancel_queue)
    await pool.send_control(Command.CANCEL, correlation_id="c", reply_to=cancel.properties.reply_to)
    await until_state(client, open=0)
    await batches.aclose()

    short = client.call_batches("k", "/rows", {"batches": 1000, "seconds": 0.1}, timeout=3, answer_slack=PATIENCE)
    with pytest.raises(RequestExpiredError):
        await numbers(short)
    await until_state(client, open=0)


@pytest.mark.nightly
@pytest.mark.proves("requests/client-user-write-p")
async def test_user_who_may_not_grant_credit_gets_the_remedy(pool, client, management):
    user = f"client-of-{pool.names.pool}"
    await management.put_user(user, password="secret")
    names = Permissions(configure="^$", write=f"^{pool.names.pool}-(req|cancel)-xchg$", read="^$")
    await management.put_permissions(user, names)
    try:
        uri = with_user(pool.uri, user, "secret")
        async with AsyncClient(uri, pool.names.pool, default_timeout=PATIENCE) as restricted:
            with pytest.raises(RequestRefusedError, match=f"{pool.names.credit_exchange}.*create-client-users"):
                await numbers(restricted.call_batches("k", "/rows", {"batches": 10}))
            assert (await restricted.call("k", "/json")).ok, "the connection of the other calls is untouched"
    finally:
        await management.delete_user(user)


async def test_credit_of_a_stranger_moves_no_stream(pool, client):
    [worker] = pool.workers
    place = {"exchange": pool.names.credit_exchange, "routing_key": worker.environment.worker_id}
    before = await yielded(client)
    batches = client.call_batches("k", "/rows", {"batches": 40})
    async with aclosing(batches):
        await anext(batches)
        await until_state(client, yielded=before + DEFAULT_CREDIT)
        for headers in ({"x-stream-id": "0" * 32, "x-stream-credit": 40}, {"x-stream-credit": 40}, {}):
            await pool.channel.publish(amqp.Message(headers=headers), **place)
        # As a control message it counts for nothing either.
        await pool.channel.publish(amqp.Message(b'{"command": "drain", "generation": [1, 1]}'), **place)
        assert await yielded(client) == before + DEFAULT_CREDIT
        assert await numbers(batches) == list(range(1000, 40_000))

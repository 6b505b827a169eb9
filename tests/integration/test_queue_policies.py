"""Queue policies with a whole daemon and a real broker: many requests at once for a queue of limited length."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from broker_api import until
from daemon_in_process import PATIENCE, api_of, managed_settings, running_daemon

from osrdyne import amqp
from osrdyne.daemon.daemon import Daemon
from osrdyne.errors import BrokerNotFoundError
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import decode_text

pytestmark = [pytest.mark.rabbitmq4, pytest.mark.usefixtures("processes")]

TOTAL, LIMIT = 1000, 100


@pytest.fixture
async def daemon(broker_settings, pool_id, tmp_path):
    async with running_daemon(managed_settings(broker_settings, pool_id, tmp_path)) as daemon:
        yield daemon


async def apply(daemon: Daemon, **elements: object) -> None:
    async with api_of(daemon) as api:
        document = {"policies": [{"match": "k", **elements}]}
        answer = await api.put("/v1/policies", json=document, params={"author": "test"})
        assert (answer.status_code, answer.json()["warnings"]) == (200, [])


async def publish_all(connection: amqp.Connection, names: PoolNames, replies: str) -> None:
    channel = await connection.channel(confirms=True)

    async def publish(number: int) -> None:
        message = amqp.Message(body=b"%d" % number, correlation_id=str(number), reply_to=replies)
        await channel.publish(message, exchange=names.requests_exchange, routing_key="k", mandatory=True)

    async with asyncio.TaskGroup() as group:
        for number in range(TOTAL):
            group.create_task(publish(number))
    await channel.close()


async def ready(connection: amqp.Connection, names: PoolNames) -> int:
    """The requests that wait; 0 before the queue exists."""
    channel = await connection.channel()
    try:
        return (await channel.declare_queue(names.request_queue(Key("k")), passive=True)).ready
    except BrokerNotFoundError:  # closes the channel
        return 0
    finally:
        await channel.close()


@pytest.mark.parametrize(
    ("overflow", "answered", "kept", "timeout"),
    [
        ("RejectIncomingMessage", ("queue-full", 429), range(LIMIT), 1),
        pytest.param("DiscardIncomingMessage", ("ok", 202), range(LIMIT), 0, marks=pytest.mark.nightly),
        pytest.param("DiscardExistingMessage", ("maxlen", 429), range(900, 1000), 0, marks=pytest.mark.nightly),
    ],
    ids=["reject", "discard-incoming", "discard-existing"],
)
@pytest.mark.proves("managed/queue-reached-maxqueuelength-policy")
async def test_a_thousand_requests_at_once_fill_the_queue_and_no_more(
    daemon, connection, channel, pool_id, overflow, answered, kept, timeout
):
    names, replies = PoolNames(pool_id), f"{pool_id}-answers"
    await channel.declare_queue(replies, exclusive=True)
    await apply(daemon, MaxQueueLength=LIMIT, EnqueueTimeout=timeout, Overflow=overflow)
    await publish_all(connection, names, replies)
    answers = await channel.consume(replies, no_ack=True)
    found: dict[int, tuple[str | None, object]] = {}
    async with asyncio.timeout(PATIENCE):
        while len(found) < TOTAL - LIMIT:
            answer = await answers.get()
            number = int(answer.properties.correlation_id or "")
            assert number not in found
            found[number] = (decode_text(answer.headers["x-status"]), answer.headers["x-code"])
    assert Counter(found.values()) == {answered: TOTAL - LIMIT}
    assert set(found) == set(range(TOTAL)) - set(kept)

    # No request is with the ingress any more, and the queue holds as many as it may.
    await until(lambda: ready(connection, names), equals=LIMIT)
    worker = await channel.consume(names.request_queue(Key("k")), prefetch=LIMIT)
    async with asyncio.timeout(PATIENCE):
        bodies = [int((await worker.get()).body) for _ in kept]
    assert (bodies, answers.waiting()) == ([*kept], 0)


@pytest.mark.proves("managed/queue-reached-maxqueuelength-policy")
async def test_requests_wait_for_the_room_that_a_worker_makes(daemon, connection, channel, pool_id):
    names, replies = PoolNames(pool_id), f"{pool_id}-answers"
    await channel.declare_queue(replies, exclusive=True)
    await apply(daemon, MaxQueueLength=LIMIT, EnqueueTimeout=60)
    await publish_all(connection, names, replies)

    worker = await connection.channel()
    await until(lambda: ready(connection, names), equals=LIMIT)
    consumer = await worker.consume(names.request_queue(Key("k")), prefetch=10)
    served = []
    async with asyncio.timeout(PATIENCE):
        while len(served) < TOTAL:
            delivery = await consumer.get()
            served.append(int(delivery.body))
            await delivery.ack()
    assert served == [*range(TOTAL)]

"""Elements of queue policies on a real broker: what each does, and its bounds. One daemon; the test plays the worker.

And a splitter. ExpirationInstant is in test_queue_lifetimes.py, Authorization in test_authorization_of_requests.py;
Discoverability and TransportProtection concern the HTTP API alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from broker_api import until, waiting_in
from daemon_in_process import PATIENCE, api_of, managed_settings, running_daemon

from osrdyne import amqp
from osrdyne.amqp import Message
from osrdyne.config.models import RequestSettings
from osrdyne.daemon.daemon import Daemon
from osrdyne.errors import BrokerInternalError, BrokerNotFoundError
from osrdyne.protocol.messages import SPLIT_HEADER
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import decode_text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("processes")]

KIB = 2**10
CAPACITY = 256 * KIB
RETRIES = 2
TOTAL, LIMIT = 1000, 100
DISCARDS = ("DiscardIncomingMessage", "DiscardExistingMessage")
RULES = {"camera": {"postfixFromStatic": ["A", "B", "C"]}, "orders": {"postfixFromRequest": {"header": "customer"}}}


@dataclass
class Pool:
    """A daemon that leads, and its clients."""

    daemon: Daemon
    names: PoolNames
    connection: amqp.Connection
    api: httpx.AsyncClient
    drops: str

    async def ask(self, key: str, body: bytes = b"x", **properties: Any) -> Asked:
        channel = await self.connection.channel(confirms=True)
        replies = f"answers-{secrets.token_hex(6)}"
        await channel.declare_queue(replies, exclusive=True)
        message = Message(body=body, reply_to=replies, correlation_id="c", **properties)
        await channel.publish(message, exchange=self.names.requests_exchange, routing_key=key, mandatory=True)
        return Asked(channel, await channel.consume(replies, no_ack=True))

    @asynccontextmanager
    async def worker(self, key: str) -> AsyncIterator[amqp.Consumer]:
        """A worker of the key that dies at the end: what it has not acknowledged returns, as a failed delivery."""
        name = self.names.request_queue(Key(key))

        async def consume() -> tuple[amqp.Connection, amqp.Consumer] | None:
            # Its own: RabbitMQ ends one that consumes while the queue is declared (broker: consume-after-declaration).
            connection = await amqp.connect(self.connection.options)
            try:
                return connection, await (await connection.channel()).consume(name, prefetch=1)
            except (BrokerNotFoundError, BrokerInternalError):
                await connection.close()
                return None

        connection, consumer = await until(consume)
        yield consumer
        await connection.close()

    async def serve(self, key: str) -> bytes:
        """Receive one request, and be done with it."""
        async with self.worker(key) as consumer, asyncio.timeout(PATIENCE):
            delivery = await consumer.get()
            await delivery.ack()
            return delivery.body

    async def poison(self, key: str, body: bytes) -> int:
        """Fail every delivery of a request until it is answered; the number of deliveries."""
        asked = await self.ask(key, body)
        deliveries = 0
        answer = asyncio.ensure_future(asked.status())
        while not answer.done():
            async with self.worker(key) as consumer:
                taking = asyncio.ensure_future(consumer.get())
                await asyncio.wait({answer, taking}, return_when=asyncio.FIRST_COMPLETED)
                deliveries += taking.done()
                taking.cancel()
                await asyncio.wait({taking})
        assert await answer == "delivery_limit"
        return deliveries


@dataclass
class Asked:
    """A request whose answer may be waited for."""

    channel: amqp.Channel
    answers: amqp.Consumer

    async def status(self) -> str | None:
        async with asyncio.timeout(PATIENCE):
            answer = await self.answers.get()
        await self.channel.close()
        return decode_text(answer.headers["x-status"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(broker, broker_settings, tmp_path_factory):
    id = f"t{secrets.token_hex(6)}"
    requests = RequestSettings(max_length_bytes=CAPACITY)
    directory = tmp_path_factory.mktemp("elements")
    settings = managed_settings(broker_settings, id, directory, requests=requests)
    options = amqp.ConnectionOptions(
        uri=broker.amqp_uri, name="osrdyne test", connect_timeout=PATIENCE, rpc_timeout=PATIENCE
    )
    connection = await amqp.connect(options)
    async with running_daemon(settings) as daemon, api_of(daemon) as api:
        made = Pool(daemon, PoolNames(id), connection, api, f"drops-{id}")
        await (await connection.channel()).declare_queue(made.drops, exclusive=True)
        policies = [
            {"match": "size", "MaxMessageSize": "8KiB"},
            {"match": "never", "MaxMessageAge": 0},
            {"match": "short", "MaxMessageAge": "1s"},
            {"match": "waits", "MaxQueueLength": LIMIT, "EnqueueTimeout": 60},
            {"match": "RejectIncomingMessage", "MaxQueueLength": LIMIT, "EnqueueTimeout": 1},
            *({"match": one, "MaxQueueLength": LIMIT, "EnqueueTimeout": 0, "Overflow": one} for one in DISCARDS),
            {"match": "retries", "MaxDequeueRetries": RETRIES, "PoisonMessageDrop": f"amqp:/queues/{made.drops}"},
        ]
        answer = await api.put("/v1/policies", json={"policies": policies}, params={"author": "test"})
        assert (answer.status_code, answer.json()["warnings"]) == (200, []), answer.text
        answer = await api.put("/v1/splitter", json=RULES, params={"author": "test"})
        assert answer.json() == {"pool": id, "version": 1, "warnings": []}
        yield made
    await connection.close()


async def test_request_beyond_max_message_size_reaches_no_queue(pool):
    # Body and headers count.
    small = await pool.ask("size", b"x" * 6 * KIB)
    for body, headers in ((b"x" * (8 * KIB + 1), {}), (b"x" * 6 * KIB, {"note": "x" * 2 * KIB})):
        assert await (await pool.ask("size", body, headers=headers)).status() == "too-large"
    assert len(await pool.serve("size")) == 6 * KIB
    assert small.answers.waiting() == 0


async def test_request_expires_at_max_message_age(pool):
    assert await (await pool.ask("never")).status() == "expired"
    # In its queue, by RabbitMQ: the client itself gives it an hour.
    assert await (await pool.ask("short", expiration="3600000")).status() == "expired"


async def test_queue_holds_no_more_bytes_than_its_capacity(pool):
    body = b"x" * 32 * KIB
    asked = [await pool.ask("capacity", body) for _ in range(2 * CAPACITY // len(body))]

    await until(lambda: any(one.answers.waiting() for one in asked))  # RabbitMQ refuses one
    (refused, *_) = [one for one in asked if one.answers.waiting()]
    assert await refused.status() == "maxlen"
    assert sum(one.answers.waiting() for one in asked) <= len(asked) // 2 + 1
    assert len(await pool.serve("capacity")) == len(body)


async def test_request_is_poison_after_max_dequeue_retries_and_one_copy_is_sent(pool):
    # The first one may be quicker than the leader is with the limit of a new queue; from then on it is exact.
    assert await pool.poison("retries", b"first") <= RequestSettings().delivery_limit
    assert await pool.poison("retries", b"second") == RETRIES
    assert await pool.poison("other", b"third") == RequestSettings().delivery_limit
    copies = await (await pool.connection.channel()).consume(pool.drops)
    found = []
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            copy = await copies.get()
            found.append((copy.body, copy.headers["x-osrdyne-poison-deliveries"], copy.properties.reply_to))
            await copy.ack()
    assert (found[0][0], found[1]) == (b"first", (b"second", RETRIES, None))
    inventory = (await pool.api.get("/v1/poison")).json()["entries"]
    assert {one["key"] for one in inventory} >= {"retries", "other"}
    assert copies.waiting() == 0


async def flood(pool: Pool, key: str) -> amqp.Consumer:
    """Publish many requests at once; their answers."""
    channel, replies = await pool.connection.channel(confirms=True), f"answers-{secrets.token_hex(6)}"
    await channel.declare_queue(replies, exclusive=True)

    async def publish(number: int) -> None:
        message = Message(body=b"%d" % number, correlation_id=str(number), reply_to=replies)
        await channel.publish(message, exchange=pool.names.requests_exchange, routing_key=key, mandatory=True)

    await asyncio.gather(*map(publish, range(TOTAL)))
    return await channel.consume(replies, no_ack=True)


async def full_queue(pool: Pool, key: str) -> str:
    """The queue of the key, once it is full."""
    queue = pool.names.request_queue(Key(key))
    await until(lambda: waiting_in(pool.connection, queue), equals=LIMIT)
    return queue


@pytest.mark.rabbitmq4
@pytest.mark.parametrize(
    ("overflow", "answered", "kept"),
    [
        ("RejectIncomingMessage", ("queue-full", 429), range(LIMIT)),
        pytest.param("DiscardIncomingMessage", ("ok", 202), range(LIMIT), marks=pytest.mark.nightly),
        pytest.param("DiscardExistingMessage", ("maxlen", 429), range(TOTAL - LIMIT, TOTAL), marks=pytest.mark.nightly),
    ],
    ids=["reject", "discard-incoming", "discard-existing"],
)
@pytest.mark.proves("managed/queue-reached-maxqueuelength-policy")
async def test_a_thousand_requests_at_once_fill_the_queue_and_no_more(pool, overflow, answered, kept):
    answers = await flood(pool, overflow)
    found: dict[int, tuple[str | None, object]] = {}
    while len(found) < TOTAL - LIMIT:
        answer = await answers.get()
        number = int(answer.properties.correlation_id or "")
        assert number not in found
        found[number] = (decode_text(answer.headers["x-status"]), answer.headers["x-code"])
    assert Counter(found.values()) == {answered: TOTAL - LIMIT}
    assert set(found) == set(range(TOTAL)) - set(kept)
    # No request is with the ingress any more, and the queue holds as many as it may.
    worker = await (await pool.connection.channel()).consume(await full_queue(pool, overflow), prefetch=LIMIT)
    assert [int((await worker.get()).body) for _ in kept] == [*kept]
    assert answers.waiting() == 0


@pytest.mark.rabbitmq4
@pytest.mark.proves("managed/queue-reached-maxqueuelength-policy")
async def test_requests_wait_for_the_room_that_a_worker_makes(pool):
    await flood(pool, "waits")
    worker = await (await pool.connection.channel()).consume(await full_queue(pool, "waits"), prefetch=10)
    served = []
    while len(served) < TOTAL:
        delivery = await worker.get()
        served.append(int(delivery.body))
        await delivery.ack()
    assert served == [*range(TOTAL)]


async def test_requests_of_one_key_are_served_beside_each_other_by_a_splitter(pool):
    for body in (b"1", b"2", b"3", b"4"):
        await pool.ask("camera", body)
    held = []
    for key in ("camera-A", "camera-B", "camera-C"):
        async with pool.worker(key) as worker:
            delivery = await worker.get()
            held.append((delivery.body, delivery.headers[SPLIT_HEADER]))
    assert held == [(body, "camera") for body in (b"1", b"2", b"3")]
    explained = await pool.api.post("/v1/explain", json={"key": "orders", "headers": {"customer": "7"}})
    assert [delivery["key"] for delivery in explained.json()["deliveries"]] == ["orders-7"]

"""The ingress of a managed pool beside a bare consume-and-republish: throughput, what a thousand routes cost, latency.

The floor consumes a quorum queue and publishes to quorum queues behind a direct exchange with confirms, written with
aio-pika alone. The ingress lets RabbitMQ send as many messages as fit into its memory, should each be as large as
`requests.max_message_bytes` allows, and takes further ones when it knows the size of those. So there are two floors:
one with the prefetch that the ingress begins with, and one with the number of small messages that it holds at most,
which shows what the limit in bytes costs. Both sides find their requests waiting, so that no publisher competes with
them. The latency is taken of both in turns, a few calls of each.

The checks of policies, a quota and circuits are compared with the same ingress without them. Each variant has a pool of
its own, and each round takes all variants, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings, RequestSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerNotFoundError
from osrdyne.pool.routing.manifest_store import Document, ManifestKind
from osrdyne.processors.prefetch import PREFETCH, first_prefetch
from osrdyne.protocol.names import DIRECT_REPLY_TO, Key, PoolNames
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure, percentile
from tests.benchmarks.ingress_documents import ALL_CHECKS, CHECKS, routes, store_documents
from tests.benchmarks.leading import Forwarded, leader

POOL = "bench_ingress"
KEYS = [Key(f"device={number}") for number in range(10)]
REQUESTS = 1_000
ROUNDS = 7
LATENCY_ROUNDS = 3
CHECK_REQUESTS = 2_000
CHECK_ROUNDS = 9
CHECK_LATENCY_ROUNDS = 5
TURNS = 10
CALLS = 20
"""Of one turn."""
BODY = json.dumps({"celsius": 50, "name": "x" * 60}).encode()
PATIENCE = 120.0


async def run(broker: EmbeddedBroker) -> list[Figure]:
    bench = _Bench(broker)
    ten, wide = zip(*[await bench.beside_floors(routes=10) for _ in range(ROUNDS)], strict=True)
    thousand = [await bench.many_routes() for _ in range(ROUNDS)]
    latencies = [await bench.latency() for _ in range(LATENCY_ROUNDS)]
    checks = await _checks(broker)
    return [
        figure("ingress, 10 routes", "req/s", ten, Goal(0.6, at_least=True)),
        figure("ingress, 10 routes, wide floor", "req/s", wide, Goal(0.6, at_least=True)),
        figure("ingress, 1,000 routes", "req/s", thousand, Goal(0.5, at_least=True)),
        figure("ingress, p50", "ms", latencies, Goal(3.0, Comparison.DIFFERENCE)),
        *checks,
    ]


async def _checks(broker: EmbeddedBroker) -> list[Figure]:
    """Throughput and latency with each kind of check, and with all, beside the same without."""
    variants = {"no checks": {}, **CHECKS, "all checks": ALL_CHECKS}
    benches = {name: _Bench(broker, f"bench_ingress_{number}") for number, name in enumerate(variants)}
    for name, documents in variants.items():
        await benches[name].use(10, documents)
        await benches[name].throughput(CHECK_REQUESTS)  # the first round only makes the queues
    # The bare one first in each round, and all of a round within seconds: the noise of the machine disturbs all alike.
    rates = [{name: await one.throughput(CHECK_REQUESTS) for name, one in benches.items()} for _ in range(CHECK_ROUNDS)]
    medians = [await _answer_medians(benches) for _ in range(CHECK_LATENCY_ROUNDS)]
    figures = []
    for name in list(variants)[1:]:
        compared = [Round(one["no checks"], one[name]) for one in rates]
        figures.append(figure(f"ingress, {name}", "req/s", compared, Goal(0.8, at_least=True)))
    for name in list(variants)[1:]:
        compared = [Round(one["no checks"], one[name]) for one in medians]
        figures.append(figure(f"ingress, {name}, p50", "ms", compared, Goal(0.3, Comparison.DIFFERENCE)))
    return figures


async def _answer_medians(benches: Mapping[str, _Bench]) -> dict[str, float]:
    """Median milliseconds from a publish to the answer for each variant. All lead at the same time, and take turns."""
    found: dict[str, list[float]] = {name: [] for name in benches}
    async with AsyncExitStack() as stack:
        callers = {name: await stack.enter_async_context(one.caller()) for name, one in benches.items()}
        for _ in range(TURNS):
            for name, caller in callers.items():
                found[name] += [await caller() for _ in range(CALLS)]
    return {name: percentile(latencies, 50) for name, latencies in found.items()}


class _Bench:
    def __init__(self, broker: EmbeddedBroker, pool: str = POOL) -> None:
        self._broker = broker
        self._pool = pool
        self._names = PoolNames(pool)

    async def beside_floors(self, *, routes: int) -> tuple[Round, Round]:
        """Requests a second beside the floor with the same prefetch, and beside the one with the widest."""
        same = await self._floor(first_prefetch(RequestSettings().max_message_bytes))
        ours = await self._ours(routes)
        return Round(same, ours), Round(await self._floor(PREFETCH), ours)

    async def many_routes(self) -> Round:
        one = await self._ours(1)
        return Round(one, await self._ours(1000))

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[Callable[[], Awaitable[float]]]:
        """Lead the pool, and have requests of one key answered at once. Yields what makes a call, and returns its
        milliseconds."""
        names, key = self._names, KEYS[0]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(leader(self._broker, self._pool, kind="managed"))
            client = await stack.enter_async_context(self._channel())
            server = await stack.enter_async_context(self._channel())
            requests = await server.consume(names.request_queue(key), no_ack=True)
            answers = await client.consume(DIRECT_REPLY_TO, no_ack=True)

            async def answer() -> None:
                async for request in requests:
                    await server.publish(
                        amqp.Message(body=BODY), exchange="", routing_key=request.properties.reply_to or ""
                    )

            async def call() -> float:
                began = time.perf_counter()
                await self._publish(client, names.requests_exchange, [key], reply_to=DIRECT_REPLY_TO)
                await answers.get()
                return (time.perf_counter() - began) * 1000

            answering = asyncio.create_task(answer())
            try:
                await call()  # binds the queue of the key
                yield call
            finally:
                answering.cancel()

    async def latency(self) -> Round:
        """Median milliseconds from a publish to the delivery of the request, one at a time."""
        await self.use(10)
        await self._declare_floor()
        names, key, ours, floor = self._names, KEYS[0], list[float](), list[float]()
        async with (
            leader(self._broker, self._pool, kind="managed"),
            self._channel() as caller,
            self._channel() as worker,
        ):
            await self._publish(caller, names.requests_exchange, [key])
            while not await self._exists(names.request_queue(key)):
                await asyncio.sleep(0.05)
            of_ours = await worker.consume(names.request_queue(key), no_ack=True)
            of_floor = await worker.consume(f"bench_floor_{key}", no_ack=True)
            await of_ours.get()
            for _ in range(TURNS):
                floor += [await self._one(caller, "bench_floor", of_floor) for _ in range(CALLS)]
                ours += [await self._one(caller, names.requests_exchange, of_ours) for _ in range(CALLS)]
        return Round(percentile(floor, 50), percentile(ours, 50))

    async def _one(self, channel: amqp.Channel, exchange: str, consumer: amqp.Consumer) -> float:
        began = time.perf_counter()
        await self._publish(channel, exchange, KEYS[:1])
        await consumer.get()
        return (time.perf_counter() - began) * 1000

    async def _ours(self, routes: int) -> float:
        """Requests a second with this number of routes."""
        await self.use(routes)
        return await self.throughput(REQUESTS)

    async def throughput(self, requests: int) -> float:
        """Requests a second of a leader that finds them in its orphan queue."""
        async with leader(self._broker, self._pool, kind="managed"):
            pass  # makes the exchanges
        await self._fill(self._names.requests_exchange, requests)
        passed = Forwarded(requests, lambda key: key in KEYS)
        async with leader(self._broker, self._pool, kind="managed", activations=passed):
            ended = await asyncio.wait_for(passed.done, PATIENCE)
            assert passed.began is not None
            rate = requests / (ended - passed.began)
        await self._empty(map(self._names.request_queue, KEYS))
        return rate

    async def use(self, count: int, documents: Mapping[ManifestKind, Document] | None = None) -> None:
        """Store this number of routes, and documents of other kinds."""
        settings = BrokerSettings(
            uri=SecretStr(self._broker.amqp_uri), management_uri=SecretStr(self._broker.management_uri)
        )
        async with ManagementClient(settings) as management:
            stored = {ManifestKind.ROUTES: routes(count), **(documents or {})}
            await store_documents(management, pool=self._pool, documents=stored)

    async def _floor(self, prefetch: int) -> float:
        await self._declare_floor()
        await self._empty(f"bench_floor_{key}" for key in KEYS)
        await self._fill("bench_floor_in", REQUESTS)
        async with await aio_pika.connect(self._broker.amqp_uri) as connection:
            channel = await connection.channel()
            exchange = await channel.get_exchange("bench_floor")
            source = await connection.channel()
            await source.set_qos(prefetch)
            done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            left, began = REQUESTS, 0.0

            async def pass_on(request: AbstractIncomingMessage) -> None:
                nonlocal left, began
                began = began or time.perf_counter()
                message = aio_pika.Message(
                    request.body,
                    headers=request.headers,
                    correlation_id=request.correlation_id,
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                )
                await exchange.publish(message, routing_key=request.routing_key or "")
                await request.ack()
                left -= 1
                if left == 0:
                    done.set_result(time.perf_counter())

            await (await source.get_queue("bench_floor_in")).consume(pass_on)
            ended = await asyncio.wait_for(done, PATIENCE)
        return REQUESTS / (ended - began)

    async def _declare_floor(self) -> None:
        quorum = {"x-queue-type": "quorum"}
        async with self._channel() as channel:
            await channel.declare_exchange("bench_floor_in", "fanout")
            await channel.declare_exchange("bench_floor", "direct")
            await channel.declare_queue("bench_floor_in", arguments=quorum)
            await channel.bind_queue("bench_floor_in", "bench_floor_in")
            for key in KEYS:
                await channel.declare_queue(f"bench_floor_{key}", arguments=quorum)
                await channel.bind_queue(f"bench_floor_{key}", "bench_floor", key)

    async def _fill(self, exchange: str, requests: int) -> None:
        async with self._channel() as channel:
            for start in range(0, requests, 500):
                keys = [KEYS[number % len(KEYS)] for number in range(start, start + 500)]
                await self._publish(channel, exchange, keys)

    async def _publish(
        self, channel: amqp.Channel, exchange: str, keys: list[Key], *, reply_to: str | None = None
    ) -> None:
        message = amqp.Message(
            body=BODY,
            headers={"level": "none", "size": "12", "site": "here", "x-rpc-path": "/x"},
            correlation_id="c",
            reply_to=reply_to,
            content_type="application/json",
            content_encoding="utf-8",
            app_id="bench",
        )
        await asyncio.gather(*(channel.publish(message, exchange=exchange, routing_key=key) for key in keys))

    async def _empty(self, queues: Iterable[str]) -> None:
        async with await aio_pika.connect(self._broker.amqp_uri) as connection:
            channel = await connection.channel()
            for queue in queues:
                await (await channel.get_queue(queue)).purge()

    async def _exists(self, queue: str) -> bool:
        try:
            async with self._channel() as channel:
                await channel.declare_queue(queue, passive=True)
        except BrokerNotFoundError:
            return False
        return True

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[amqp.Channel]:
        """A channel with a connection of its own that does not outlive it: a consumer would go on taking requests."""
        connection = await amqp.connect(amqp.ConnectionOptions(uri=self._broker.amqp_uri, name="osrdyne bench"))
        try:
            yield await connection.channel(confirms=True)
        finally:
            await connection.close()

"""The ingress of a managed pool beside a bare consume-and-republish: throughput, what a thousand routes cost, latency.

The prefetch of the floor is the number of small messages that the ingress holds at most, so that the figure has what
the ingress's limit in bytes costs. Both sides find their requests waiting, so that no publisher competes with them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.pool.routing.manifest_store import Document, ManifestKind
from osrdyne.processors.prefetch import PREFETCH
from osrdyne.protocol.names import DIRECT_REPLY_TO, Key, PoolNames
from osrdyne.testing.fakes.amqp import purge_queue
from tests.benchmarks.bare import PERSISTENT
from tests.benchmarks.blocks import seconds
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure, percentile
from tests.benchmarks.harness import QUORUM, bare_forward, own_channel, publish_all, settings_of
from tests.benchmarks.ingress_documents import CHECKS, routes, store_documents
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
Call = Callable[[], Awaitable[None]]


async def run(broker: EmbeddedBroker) -> list[Figure]:
    bench = _Bench(broker)
    ten = [await bench.beside_floor() for _ in range(ROUNDS)]
    thousand = [await bench.many_routes() for _ in range(ROUNDS)]
    latencies = [await bench.latency() for _ in range(LATENCY_ROUNDS)]
    return [
        figure("ingress, 10 routes", "req/s", ten, Goal(0.6, at_least=True)),
        figure("ingress, 1,000 routes", "req/s", thousand, Goal(0.5, at_least=True)),
        figure("ingress, p50", "ms", latencies, Goal(3.0, Comparison.DIFFERENCE)),
        *await _checks(broker),
    ]


async def _checks(broker: EmbeddedBroker) -> list[Figure]:
    """Throughput and latency with all checks, beside the same without."""
    plain, checked = _Bench(broker, "bench_ingress_plain"), _Bench(broker, "bench_ingress_checked")
    for bench, documents in ((plain, {}), (checked, CHECKS)):
        await bench.use(10, documents)
        await bench.throughput(CHECK_REQUESTS)  # the first round only makes the queues
    rates = [
        Round(await plain.throughput(CHECK_REQUESTS), await checked.throughput(CHECK_REQUESTS))
        for _ in range(CHECK_ROUNDS)
    ]
    medians = [await _answer_medians(plain, checked) for _ in range(CHECK_LATENCY_ROUNDS)]
    return [
        figure("ingress, all checks", "req/s", rates, Goal(0.8, at_least=True)),
        figure("ingress, all checks, p50", "ms", medians, Goal(0.3, Comparison.DIFFERENCE)),
    ]


async def _answer_medians(plain: _Bench, checked: _Bench) -> Round:
    """Median milliseconds from a publish to the answer. Both lead at the same time, and take turns."""
    async with plain.caller() as floor, checked.caller() as ours:
        return await _in_turns(floor, ours)


async def _in_turns(floor: Call, ours: Call) -> Round:
    """Median milliseconds of both, a few calls of each at a time."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for latencies, call in zip(found, (floor, ours), strict=True):
            latencies += [await seconds(call()) * 1000 for _ in range(CALLS)]
    return Round(*(percentile(latencies, 50) for latencies in found))


class _Bench:
    def __init__(self, broker: EmbeddedBroker, pool: str = POOL) -> None:
        self._broker = broker
        self._pool = pool
        self._names = PoolNames(pool)

    async def beside_floor(self) -> Round:
        """Requests a second."""
        return Round(await self._floor(), await self._ours(10))

    async def many_routes(self) -> Round:
        one = await self._ours(1)
        return Round(one, await self._ours(1000))

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[Call]:
        """Lead the pool, and have requests of one key answered at once."""
        names, key = self._names, KEYS[0]
        async with (
            leader(self._broker, self._pool, kind="managed"),
            own_channel(self._broker) as client,
            own_channel(self._broker) as server,
        ):
            requests = await server.consume(names.request_queue(key), no_ack=True)
            answers = await client.consume(DIRECT_REPLY_TO, no_ack=True)

            async def answer() -> None:
                async for request in requests:
                    reply_to = request.properties.reply_to or ""
                    await server.publish(amqp.Message(body=BODY), exchange="", routing_key=reply_to)

            async def call() -> None:
                await _publish(client, names.requests_exchange, key, reply_to=DIRECT_REPLY_TO)
                await answers.get()

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
        key, exchange = KEYS[0], self._names.requests_exchange
        async with (
            leader(self._broker, self._pool, kind="managed"),
            own_channel(self._broker) as caller,
            own_channel(self._broker) as worker,
        ):
            of_ours = await worker.consume(self._names.request_queue(key), no_ack=True)
            of_floor = await worker.consume(f"bench_floor_{key}", no_ack=True)
            await _publish(caller, exchange, key)  # binds the queue, which is there since the throughput was measured
            await of_ours.get()

            async def deliver(exchange: str, consumer: amqp.Consumer) -> None:
                await _publish(caller, exchange, key)
                await consumer.get()

            return await _in_turns(partial(deliver, "bench_floor", of_floor), partial(deliver, exchange, of_ours))

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
            rate = await passed.rate()
        await self._empty(map(self._names.request_queue, KEYS))
        return rate

    async def use(self, count: int, documents: Mapping[ManifestKind, Document] | None = None) -> None:
        """Store this number of routes, and documents of other kinds."""
        async with ManagementClient(settings_of(self._broker)) as management:
            stored = {ManifestKind.ROUTES: routes(count), **(documents or {})}
            await store_documents(management, pool=self._pool, documents=stored)

    async def _floor(self) -> float:
        def copy(request: AbstractIncomingMessage) -> tuple[aio_pika.Message, str]:
            same = {"headers": request.headers, "correlation_id": request.correlation_id}
            return aio_pika.Message(request.body, **same, delivery_mode=PERSISTENT), request.routing_key or ""

        await self._declare_floor()
        await self._empty(f"bench_floor_{key}" for key in KEYS)
        await self._fill("bench_floor_in", REQUESTS)
        sizes = {"prefetch": PREFETCH, "count": REQUESTS}
        return await bare_forward(self._broker, "bench_floor_in", copy, exchange="bench_floor", **sizes)

    async def _declare_floor(self) -> None:
        async with own_channel(self._broker) as channel:
            await channel.declare_exchange("bench_floor_in", "fanout")
            await channel.declare_exchange("bench_floor", "direct")
            await channel.declare_queue("bench_floor_in", arguments=QUORUM)
            await channel.bind_queue("bench_floor_in", "bench_floor_in")
            for key in KEYS:
                await channel.declare_queue(f"bench_floor_{key}", arguments=QUORUM)
                await channel.bind_queue(f"bench_floor_{key}", "bench_floor", key)

    async def _fill(self, exchange: str, requests: int) -> None:
        async with own_channel(self._broker) as channel:
            await publish_all(requests, lambda number: _publish(channel, exchange, KEYS[number % len(KEYS)]))

    async def _empty(self, queues: Iterable[str]) -> None:
        async with own_channel(self._broker) as channel:
            for queue in queues:
                await purge_queue(channel, queue)


async def _publish(channel: amqp.Channel, exchange: str, key: Key, *, reply_to: str | None = None) -> None:
    message = amqp.Message(
        body=BODY,
        headers={"level": "none", "size": "12", "site": "here", "x-rpc-path": "/x"},
        correlation_id="c",
        reply_to=reply_to,
        content_type="application/json",
        content_encoding="utf-8",
        app_id="bench",
    )
    await channel.publish(message, exchange=exchange, routing_key=key)

"""From the first request for a key to its queue bound, the request in it and the driver asked.

The floor is what no controller can do without: declare, bind and publish with a confirm, over one channel of aio-pika,
the same queues (same names, arguments, policy) on the same exchange. What it has confirmed is lost when the node is
killed in the next second. The careful floor takes the precaution that osrdyne takes: one more queue is declared before
the binding (decision 0020).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import TypeVar

import aio_pika

from osrdyne import amqp
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.leading import Activations, leader

POOL = "bench_act"
PRECAUTION = "bench-precaution"
ROUNDS = 11
ONE_BY_ONE = 20
BURST = 200
MANY = 100
BURST_ROUNDS = 7
WARM_UP = 5
PATIENCE = 120.0
"""Seconds in which keys must become active; what needs them has failed."""
PAUSE = 0.5
"""Seconds for the broker to finish with deleted queues, which it goes on with after its answer."""
T = TypeVar("T")


async def run(broker: EmbeddedBroker) -> list[Figure]:
    single = [await _round(broker, lambda keys: keys.one_by_one(ONE_BY_ONE)) for _ in range(ROUNDS)]
    bare, careful = zip(*single, strict=True)
    bursts, first = zip(
        *[await _round(broker, lambda keys: keys.at_once(BURST)) for _ in range(BURST_ROUNDS)], strict=True
    )
    many = [await _round(broker, lambda keys: keys.median_of(MANY)) for _ in range(BURST_ROUNDS)]
    return [
        figure("activation of a new key", "ms", bare, Goal(1.5)),
        figure("activation, careful floor", "ms", careful, Goal(1.15)),
        figure("activation, time", "ms", careful, Goal(20.0, Comparison.ABSOLUTE)),
        figure("200 new keys at once", "keys/s", bursts, Goal(0.7, at_least=True)),
        figure("200 new keys at once, first key", "ms", first, Goal(150.0, Comparison.ABSOLUTE)),
        figure("100 new keys at once, median key", "ms", many, Goal(1.25)),
        figure("100 new keys at once, time", "ms", many, Goal(600.0, Comparison.ABSOLUTE)),
    ]


async def _round(broker: EmbeddedBroker, measure: Callable[[_Keys], Awaitable[T]]) -> T:
    """With a leader of its own: workers here never say that they are ready, and no pool has so many that load."""
    async with _keys(broker) as keys:
        await keys.one_by_one(WARM_UP)
        return await measure(keys)


@asynccontextmanager
async def _keys(broker: EmbeddedBroker) -> AsyncIterator[_Keys]:
    async with leader(broker, POOL) as activations, await aio_pika.connect(broker.amqp_uri) as floor:
        connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, name="osrdyne bench"))
        try:
            client = await connection.channel(confirms=True)
            channel = await floor.channel()
            exchange = await channel.get_exchange(PoolNames(POOL).requests_exchange)
            yield _Keys(activations, client, await connection.channel(), channel, exchange)
        finally:
            await connection.close()


class _Keys:
    """Makes new keys active, on both sides."""

    def __init__(
        self,
        activations: Activations,
        client: amqp.Channel,
        cleaner: amqp.Channel,
        bare: aio_pika.abc.AbstractChannel,
        exchange: aio_pika.abc.AbstractExchange,
    ) -> None:
        self._activations = activations
        self._client = client
        self._cleaner = cleaner
        self._bare = bare
        self._exchange = exchange
        self._names = PoolNames(POOL)
        self._numbers = itertools.count(1)
        self._made: list[Key] = []

    async def one_by_one(self, count: int) -> tuple[Round, Round]:
        """Median milliseconds of one key beside both floors, key by key in turns."""
        bare, careful, ours = [], [], []
        for _ in range(count):
            bare.append(await self._floor([self._new_key()]))
            careful.append(await self._floor([self._new_key()], careful=True))
            ours += await self._ours([self._new_key()])
            await self._cleaner.delete_queue(PRECAUTION)
        await self._clear()
        took = median(ours) * 1000
        return Round(median(bare) * 1000, took), Round(median(careful) * 1000, took)

    async def at_once(self, count: int) -> tuple[Round, Round]:
        """Keys a second, and milliseconds until the first one is active."""
        floor = await asyncio.gather(*[self._timed_floor(self._new_key(), time.perf_counter()) for _ in range(count)])
        await self._clear()
        ours = await self._ours([self._new_key() for _ in range(count)])
        await self._clear()
        return Round(count / max(floor), count / max(ours)), Round(min(floor) * 1000, min(ours) * 1000)

    async def median_of(self, count: int) -> Round:
        """Milliseconds until the median key of so many at once is active."""
        floor = await asyncio.gather(*[self._timed_floor(self._new_key(), time.perf_counter()) for _ in range(count)])
        await self._clear()
        ours = await self._ours([self._new_key() for _ in range(count)])
        await self._clear()
        return Round(median(floor) * 1000, median(ours) * 1000)

    async def _timed_floor(self, key: Key, began: float) -> float:
        await self._declare_bind_publish(key, careful=False)
        return time.perf_counter() - began

    def _new_key(self) -> Key:
        self._made.append(Key(f"infra={next(self._numbers)}"))
        return self._made[-1]

    async def _floor(self, keys: list[Key], *, careful: bool = False) -> float:
        """Seconds. The channel is kept as busy as it can be."""
        began = time.perf_counter()
        await asyncio.gather(*(self._declare_bind_publish(key, careful=careful) for key in keys))
        return time.perf_counter() - began

    async def _declare_bind_publish(self, key: Key, *, careful: bool) -> None:
        name = self._names.request_queue(key)
        arguments: dict[str, object] = request_queue_arguments(key)
        queue = await self._bare.declare_queue(name, durable=True, arguments=arguments)  # type: ignore[arg-type]
        if careful:
            await self._bare.declare_queue(PRECAUTION, durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind(self._exchange, key)
        message = aio_pika.Message(b"", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._exchange.publish(message, routing_key=key)

    async def _ours(self, keys: list[Key]) -> list[float]:
        """Seconds of each key, in no order."""
        active = [self._activations.expect(key) for key in keys]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(self._request(key))
        async with asyncio.timeout(PATIENCE):
            return [at - began for at in await asyncio.gather(*active)]

    async def _request(self, key: Key) -> None:
        await self._client.publish(amqp.Message(), exchange=self._names.requests_exchange, routing_key=key)

    async def _clear(self) -> None:
        """Both sides find as many queues, and a broker that has nothing left to do."""
        while self._made:
            await self._cleaner.delete_queue(self._names.request_queue(self._made.pop()))
        await asyncio.sleep(PAUSE)

"""From the first request for a key to its queue bound, the request in it and the driver asked.

The floor is what no controller can do without. What it has confirmed is lost when the node is killed in the next
second. The careful floor takes the precaution that osrdyne takes (decision 0020).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractExchange

from osrdyne import amqp
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames
from tests.benchmarks.bare import PERSISTENT
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.harness import PATIENCE, QUORUM, connection
from tests.benchmarks.leading import Activations, leader

POOL = "bench_act"
NAMES = PoolNames(POOL)
PRECAUTION = "bench-precaution"
ROUNDS = 11
ONE_BY_ONE = 20
BURST = 200
MANY = 100
BURST_ROUNDS = 7
WARM_UP = 5
PAUSE = 0.5
"""Seconds for the broker to finish with deleted queues, which it goes on with after its answer."""
T = TypeVar("T")


async def run(broker: EmbeddedBroker) -> list[Figure]:
    single = [await _round(broker, lambda keys: keys.one_by_one(ONE_BY_ONE)) for _ in range(ROUNDS)]
    bare, careful = zip(*single, strict=True)
    bursts = [await _round(broker, lambda keys: keys.at_once(BURST)) for _ in range(BURST_ROUNDS)]
    rates, first, _ = zip(*bursts, strict=True)
    many = [(await _round(broker, lambda keys: keys.at_once(MANY)))[2] for _ in range(BURST_ROUNDS)]
    return [
        figure("activation of a new key", "ms", bare, Goal(1.5)),
        figure("activation, careful floor", "ms", careful, Goal(1.15)),
        figure("activation, time", "ms", careful, Goal(20.0, Comparison.ABSOLUTE)),
        figure("200 new keys at once", "keys/s", rates, Goal(0.7, at_least=True)),
        figure("200 new keys at once, first key", "ms", first, Goal(150.0, Comparison.ABSOLUTE)),
        figure("100 new keys at once, median key", "ms", many, Goal(1.25)),
        figure("100 new keys at once, time", "ms", many, Goal(600.0, Comparison.ABSOLUTE)),
    ]


async def _round(broker: EmbeddedBroker, measure: Callable[[_Keys], Awaitable[T]]) -> T:
    """With a leader of its own: workers here never report that they are ready, and no pool has so many that load."""
    async with _keys(broker) as keys:
        await keys.one_by_one(WARM_UP)
        return await measure(keys)


@asynccontextmanager
async def _keys(broker: EmbeddedBroker) -> AsyncIterator[_Keys]:
    floor, own = await aio_pika.connect(broker.amqp_uri), connection(broker)
    async with leader(broker, POOL) as activations, floor, own as ours:
        client, bare = await ours.channel(confirms=True), await floor.channel()
        exchange = await bare.get_exchange(NAMES.requests_exchange)
        yield _Keys(activations, client, await ours.channel(), bare, exchange)


@dataclass
class _Keys:
    """Makes new keys active, on both sides."""

    activations: Activations
    client: amqp.Channel
    cleaner: amqp.Channel
    bare: AbstractChannel
    exchange: AbstractExchange
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _made: list[Key] = field(default_factory=list)

    async def one_by_one(self, count: int) -> tuple[Round, Round]:
        """Median milliseconds of one key beside both floors, key by key in turns."""
        bare, careful, ours = [], [], []
        for _ in range(count):
            bare += await self._floor(1)
            careful += await self._floor(1, careful=True)
            ours += await self._ours(1)
            await self.cleaner.delete_queue(PRECAUTION)
        await self._clear()
        return Round(median(bare), median(ours)), Round(median(careful), median(ours))

    async def at_once(self, count: int) -> tuple[Round, Round, Round]:
        """Keys a second, and milliseconds until the first and the median key are active."""
        floor = await self._floor(count)
        await self._clear()
        ours = await self._ours(count)
        await self._clear()
        return (
            Round(count * 1000 / max(floor), count * 1000 / max(ours)),
            Round(min(floor), min(ours)),
            Round(median(floor), median(ours)),
        )

    def _new_key(self) -> Key:
        self._made.append(Key(f"infra={next(self._numbers)}"))
        return self._made[-1]

    async def _floor(self, count: int, *, careful: bool = False) -> list[float]:
        """Milliseconds of each key. The channel is kept as busy as it can be."""
        keys, began = [self._new_key() for _ in range(count)], time.perf_counter()

        async def activate(key: Key) -> float:
            await self._declare_bind_publish(key, careful=careful)
            return (time.perf_counter() - began) * 1000

        return await asyncio.gather(*map(activate, keys))

    async def _declare_bind_publish(self, key: Key, *, careful: bool) -> None:
        arguments: dict[str, object] = request_queue_arguments(NAMES, key)
        name = NAMES.request_queue(key)
        queue = await self.bare.declare_queue(name, durable=True, arguments=arguments)  # type: ignore[arg-type]
        if careful:
            await self.bare.declare_queue(PRECAUTION, durable=True, arguments=dict(QUORUM))
        await queue.bind(self.exchange, key)
        await self.exchange.publish(aio_pika.Message(b"", delivery_mode=PERSISTENT), routing_key=key)

    async def _ours(self, count: int) -> list[float]:
        """Milliseconds of each key, in no order."""
        keys = [self._new_key() for _ in range(count)]
        active = [self.activations.expect(key) for key in keys]
        exchange, began = NAMES.requests_exchange, time.perf_counter()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(self.client.publish(amqp.Message(), exchange=exchange, routing_key=key))
            return [(at - began) * 1000 for at in await asyncio.gather(*active)]

    async def _clear(self) -> None:
        """Both sides find as many queues, and a broker that has nothing left to do."""
        while self._made:
            await self.cleaner.delete_queue(NAMES.request_queue(self._made.pop()))
        await asyncio.sleep(PAUSE)

"""How soon a new leader of a large pool serves new keys.

The groups are there, bound and with a worker each, as far as the driver of the benchmark reports. Requests for new keys
are published from the moment at which the next daemon begins to lead. The floor is the same with a pool of no groups.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from osrdyne import amqp
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.harness import PATIENCE, connection, own_channel
from tests.benchmarks.leading import Activations, leader

NAMES = PoolNames("bench_change")
SIZES = (1_000, 3_000)
NEW = 20
PACE = 0.2
"""Seconds between two requests for new keys."""
CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Change:
    """Seconds until the first new key is active, from the moment at which the daemon connects; the longest time from
    the request for a new key to its activation."""

    first: float
    longest: float


async def run(_: EmbeddedBroker) -> list[Figure]:
    """On RabbitMQs of their own: thousands of queues would be in the way of the benchmarks that follow."""
    figures, goal = [], Goal(5.0, Comparison.ABSOLUTE)
    floor = await _measure(0)
    for size in SIZES:
        name, ours = f"new leader of {size:,} groups", await _measure(size)
        figures += [
            figure(f"{name}, first new key", "s", [Round(floor.first, ours.first)], goal),
            figure(f"{name}, longest wait", "s", [Round(floor.longest, ours.longest)], goal),
        ]
    return figures


async def _measure(size: int) -> Change:
    found = [Key(f"found={number}") for number in range(size)]
    activations = Activations()
    async with EmbeddedBroker() as broker:
        async with leader(broker, NAMES.pool):
            pass  # makes the exchanges
        await asyncio.gather(*(_make_groups(broker, found[first::CONNECTIONS]) for first in range(CONNECTIONS)))
        async with own_channel(broker) as client, asyncio.TaskGroup() as group:
            began = time.perf_counter()
            asking = group.create_task(_ask(client, activations))
            async with leader(broker, NAMES.pool, activations=activations, running=found), asyncio.timeout(PATIENCE):
                asked = await asking
                active = await asyncio.gather(*(done for _, done in asked))
    waits = [at - published for (published, _), at in zip(asked, active, strict=True)]
    return Change(min(active) - began, max(waits))


async def _make_groups(broker: EmbeddedBroker, keys: Sequence[Key]) -> None:
    async with connection(broker) as own:
        channel = await own.channel()
        for key in keys:
            queue = NAMES.request_queue(key)
            await channel.declare_queue(queue, arguments=request_queue_arguments(NAMES, key))
            await channel.begin_bind_queue(queue, NAMES.requests_exchange, key)
        await channel.ping()


async def _ask(client: amqp.Channel, activations: Activations) -> list[tuple[float, asyncio.Future[float]]]:
    """Publish requests for new keys at a steady pace; when each was published, and when its key became active."""
    asked = []
    for number in range(NEW):
        key = Key(f"new={number}")
        asked.append((time.perf_counter(), activations.expect(key)))
        await client.publish(amqp.Message(), exchange=NAMES.requests_exchange, routing_key=key)
        await asyncio.sleep(PACE)
    return asked

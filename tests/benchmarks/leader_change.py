"""How soon a new leader of a large pool serves new keys.

    python -m tests.benchmarks.leader_change --keys 3000

The groups are there, bound and with a worker each, as far as the driver of the benchmark tells. Requests for new keys
are published from the moment at which the next daemon begins to lead. The floor is the same with a pool of no groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from osrdyne import amqp
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.leading import Activations, leader

SIZES = (1_000, 3_000)
NEW = 20
PACE = 0.2
"""Seconds between two requests for new keys."""
CONNECTIONS = 4
PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class Change:
    """Seconds. `leading`: until the daemon says that it leads; `first`: until the first new key is active, counted from
    the same moment; `waits`: of each new key, from its request to its activation."""

    leading: float
    first: float
    waits: Sequence[float]


async def run(broker: EmbeddedBroker) -> list[Figure]:
    """On RabbitMQs of their own: thousands of queues would be in the way of the benchmarks that follow."""
    figures = []
    floor = await measure(0)
    for size in SIZES:
        change = await measure(size)
        first = [Round(floor.first, change.first)]
        longest = [Round(max(floor.waits), max(change.waits))]
        figures += [
            figure(f"new leader of {size:,} groups, first new key", "s", first, Goal(5.0, Comparison.ABSOLUTE)),
            figure(f"new leader of {size:,} groups, longest wait", "s", longest, Goal(5.0, Comparison.ABSOLUTE)),
        ]
    return figures


async def measure(size: int) -> Change:
    async with EmbeddedBroker() as broker:
        return await _measure(broker, size)


async def _measure(broker: EmbeddedBroker, size: int) -> Change:
    names = PoolNames("bench_change")
    async with leader(broker, names.pool):
        pass  # makes the exchanges
    found = [Key(f"found={number}") for number in range(size)]
    await asyncio.gather(*(_make_groups(broker, names, found[first::CONNECTIONS]) for first in range(CONNECTIONS)))
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, name="osrdyne bench"))
    activations = Activations()
    try:
        client = await connection.channel(confirms=True)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_ask(client, names, activations))
            async with leader(broker, names.pool, activations=activations, running=found):
                leading = time.perf_counter() - began
                asked = await asking
                async with asyncio.timeout(PATIENCE):
                    active = await asyncio.gather(*(done for _, done in asked))
    finally:
        await connection.close()
    waits = [at - published for (published, _), at in zip(asked, active, strict=True)]
    return Change(leading, min(active) - began, waits)


async def _make_groups(broker: EmbeddedBroker, names: PoolNames, keys: Sequence[Key]) -> None:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, rpc_timeout=PATIENCE))
    try:
        channel = await connection.channel()
        for key in keys:
            queue = names.request_queue(key)
            await channel.declare_queue(queue, arguments=request_queue_arguments(key))
            await channel.begin_bind_queue(queue, names.requests_exchange, key)
        await channel.ping()
    finally:
        await connection.close()


async def _ask(
    client: amqp.Channel, names: PoolNames, activations: Activations
) -> list[tuple[float, asyncio.Future[float]]]:
    """Publish requests for new keys at a steady pace; when each was published, and when its key became active."""
    asked = []
    for number in range(NEW):
        key = Key(f"new={number}")
        asked.append((time.perf_counter(), activations.expect(key)))
        await client.publish(amqp.Message(), exchange=names.requests_exchange, routing_key=key)
        await asyncio.sleep(PACE)
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=list(SIZES))
    for size in parser.parse_args().keys:
        change = asyncio.run(measure(size))
        figures = {
            "keys": size,
            "leading": round(change.leading, 2),
            "first_new_key": round(change.first, 2),
            "longest_wait": round(max(change.waits), 2),
            "median_wait": round(median(change.waits), 3),
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

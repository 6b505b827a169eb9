"""Listings of thousands of queues while others come and go: `python -m tests.benchmarks.listings --queues 5000`.

Prints how many listings succeeded, how many failed, and how long they took. The same script runs on earlier commits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError

PREFIX = "bench-req-"
ARGUMENTS = {"x-queue-type": "quorum"}
CHANNELS = 8


async def declare(connection: amqp.Connection, numbers: range) -> None:
    channel = await connection.channel()
    for number in numbers:
        await channel.declare_queue(f"{PREFIX}{number:06d}", arguments=ARGUMENTS)


async def churn(connection: amqp.Connection, per_second: float) -> None:
    """Declare a queue and delete an earlier one, at all places of the order of names."""
    channel = await connection.channel()
    number = 0
    while True:
        await channel.declare_queue(f"{PREFIX}{number * 7919 % 1_000_000:06d}x", arguments=ARGUMENTS)
        if number >= 20:
            await channel.delete_queue(f"{PREFIX}{(number - 20) * 7919 % 1_000_000:06d}x")
        number += 1
        await asyncio.sleep(2 / per_second)


async def measure(queues: int, per_second: float, seconds: float) -> dict[str, object]:
    async with EmbeddedBroker() as broker:
        connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, rpc_timeout=120.0))
        await asyncio.gather(*(declare(connection, range(first, queues, CHANNELS)) for first in range(CHANNELS)))
        settings = BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))
        disturbance = asyncio.create_task(churn(connection, per_second))
        took, failed, shortest = [], 0, queues
        async with ManagementClient(settings) as management:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                began = time.perf_counter()
                try:
                    listed = {queue.name for queue in await management.list_queues(PREFIX)}
                    lasting = sum(f"{PREFIX}{number:06d}" in listed for number in range(queues))
                    shortest = min(shortest, lasting)
                    took.append(time.perf_counter() - began)
                except BrokerError:
                    failed += 1
        disturbance.cancel()
        await connection.close()
    median = round(statistics.median(took), 2) if took else None
    return {
        "queues": queues,
        "changes_per_second": per_second,
        "succeeded": len(took),
        "failed": failed,
        "median_seconds": median,
        "fewest_lasting_queues_listed": shortest if took else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=5000)
    parser.add_argument("--changes", type=float, default=20.0, help="declarations and deletions a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.queues, options.changes, options.seconds))))


if __name__ == "__main__":
    main()

"""Listings of thousands of queues while others come and go: `python -m tests.benchmarks.listings --queues 5000`.

Prints how many listings succeeded, how many failed, and how long they took. The floor is a listing without churn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure

PREFIX = "bench-req-"
ARGUMENTS = {"x-queue-type": "quorum"}
CHANNELS = 8
QUEUES = 5_000
CHANGES_PER_SECOND = 20.0
SECONDS = 15.0
"""Of the benchmark in `make bench`, without churn and with it."""


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


@dataclass(slots=True)
class Listings:
    """Seconds of those that succeeded, how many failed, and the fewest of the lasting queues that one of them held."""

    took: list[float] = field(default_factory=list)
    failed: int = 0
    shortest: int | None = None

    async def add(self, management: ManagementClient, queues: int) -> None:
        began = time.perf_counter()
        try:
            listed = {queue.name for queue in await management.list_queues(PREFIX)}
        except BrokerError:
            self.failed += 1
            return
        self.took.append(time.perf_counter() - began)
        lasting = sum(f"{PREFIX}{number:06d}" in listed for number in range(queues))
        self.shortest = lasting if self.shortest is None else min(self.shortest, lasting)


async def run(_: EmbeddedBroker) -> list[Figure]:
    """On a RabbitMQ of its own: thousands of queues would be in the way of the benchmarks that follow."""
    quiet, churned = await measure(QUEUES, CHANGES_PER_SECOND, seconds=SECONDS)
    rounds = [Round(floor, ours) for floor, ours in zip(quiet.took, churned.took, strict=False)]
    missing = [Round(0.0, float(QUEUES - (churned.shortest or 0))), Round(0.0, float(churned.failed))]
    return [
        figure("5,000 queues listed under churn", "s", rounds, Goal(2.0)),
        figure("listings that failed or lacked a queue", "", missing, Goal(0.0, Comparison.DIFFERENCE)),
    ]


async def measure(queues: int, per_second: float, *, seconds: float) -> tuple[Listings, Listings]:
    """Listings without and with churn, each for `seconds`."""
    async with EmbeddedBroker() as broker:
        connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, rpc_timeout=120.0))
        await asyncio.gather(*(declare(connection, range(first, queues, CHANNELS)) for first in range(CHANNELS)))
        settings = BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))
        quiet, churned = Listings(), Listings()
        async with ManagementClient(settings) as management:
            await _list_for(seconds, quiet, management, queues)
            disturbance = asyncio.create_task(churn(connection, per_second))
            await _list_for(seconds, churned, management, queues)
            disturbance.cancel()
        await connection.close()
    return quiet, churned


async def _list_for(seconds: float, listings: Listings, management: ManagementClient, queues: int) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        await listings.add(management, queues)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", type=int, default=QUEUES)
    parser.add_argument("--changes", type=float, default=CHANGES_PER_SECOND, help="declarations and deletions a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    for name, listings in zip(
        ("quiet", "churn"),
        asyncio.run(measure(options.queues, options.changes, seconds=options.seconds)),
        strict=True,
    ):
        figures = {
            "listings": name,
            "queues": options.queues,
            "succeeded": len(listings.took),
            "failed": listings.failed,
            "median_seconds": round(statistics.median(listings.took), 2) if listings.took else None,
            "fewest_lasting_queues_listed": listings.shortest,
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

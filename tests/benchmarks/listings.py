"""Listings of thousands of queues while others come and go. The floor is a listing without churn."""

import asyncio
import time
from dataclasses import dataclass, field

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.harness import QUORUM, connection, settings_of

PREFIX = "bench-req-"
CHANNELS = 8
QUEUES = 5_000
CHANGES_PER_SECOND = 20.0
SECONDS = 15.0
"""Without churn, and with it."""


async def declare(own: amqp.Connection, numbers: range) -> None:
    channel = await own.channel()
    for number in numbers:
        await channel.declare_queue(f"{PREFIX}{number:06d}", arguments=QUORUM)


async def churn(own: amqp.Connection) -> None:
    """Declare a queue and delete an earlier one, at all places of the order of names."""
    channel = await own.channel()
    number = 0
    while True:
        await channel.declare_queue(f"{PREFIX}{number * 7919 % 1_000_000:06d}x", arguments=QUORUM)
        if number >= 20:
            await channel.delete_queue(f"{PREFIX}{(number - 20) * 7919 % 1_000_000:06d}x")
        number += 1
        await asyncio.sleep(2 / CHANGES_PER_SECOND)


@dataclass(slots=True)
class Listings:
    """Seconds of those that succeeded, how many failed, and the fewest of the lasting queues that one of them held."""

    took: list[float] = field(default_factory=list)
    failed: int = 0
    shortest: int | None = None

    async def add(self, management: ManagementClient) -> None:
        began = time.perf_counter()
        try:
            listed = {queue.name for queue in await management.list_queues(PREFIX)}
        except BrokerError:
            self.failed += 1
            return
        self.took.append(time.perf_counter() - began)
        lasting = sum(f"{PREFIX}{number:06d}" in listed for number in range(QUEUES))
        self.shortest = lasting if self.shortest is None else min(self.shortest, lasting)


async def run(_: EmbeddedBroker) -> list[Figure]:
    """On a RabbitMQ of its own: thousands of queues would be in the way of the benchmarks that follow."""
    quiet, churned = await _measure()
    rounds = [Round(floor, ours) for floor, ours in zip(quiet.took, churned.took, strict=False)]
    missing = [Round(0.0, float(QUEUES - (churned.shortest or 0))), Round(0.0, float(churned.failed))]
    return [
        figure("5,000 queues listed under churn", "s", rounds, Goal(2.0)),
        figure("listings that failed or lacked a queue", "", missing, Goal(0.0, Comparison.DIFFERENCE)),
    ]


async def _measure() -> tuple[Listings, Listings]:
    """Listings without and with churn."""
    quiet, churned = Listings(), Listings()
    async with EmbeddedBroker() as broker, connection(broker) as own:
        await asyncio.gather(*(declare(own, range(first, QUEUES, CHANNELS)) for first in range(CHANNELS)))
        async with ManagementClient(settings_of(broker)) as management:
            await _keep_listing(quiet, management)
            disturbance = asyncio.create_task(churn(own))
            await _keep_listing(churned, management)
            disturbance.cancel()
    return quiet, churned


async def _keep_listing(listings: Listings, management: ManagementClient) -> None:
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        await listings.add(management)

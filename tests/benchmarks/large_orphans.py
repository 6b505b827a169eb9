"""What large requests for a new key cost the leader: its memory, and whether it keeps its term.

    python -m tests.benchmarks.large_orphans [--requests 250] [--megabytes 10]

A RabbitMQ of its own has the requests in the orphan queue before a leader starts, in a process of its own. Prints the
highest memory of that process, and the error that ended its term, if any.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time
from types import SimpleNamespace
from typing import Any

import uvloop

from osrdyne import amqp
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.logs import configure_logging
from osrdyne.protocol.names import Key, PoolNames
from tests.benchmarks.leading import leader

POOL = "bench_large"
KEY = Key("a")
PATIENCE = 600.0


async def fill(broker: EmbeddedBroker, requests: int, size: int) -> None:
    """Put the requests into the orphan queue: there is no leader yet."""
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri))
    channel = await connection.channel(confirms=True)
    await declare_topology(channel, pool_topology(POOL))
    message = amqp.Message(body=bytes(size))
    for _ in range(requests):
        await channel.publish(message, exchange=PoolNames(POOL).requests_exchange, routing_key=KEY)
    await connection.close()


async def lead(amqp_uri: str, management_uri: str, requests: int) -> str:
    """Lead until all requests are in the queue of their key; why the term ended before, or nothing."""
    broker: Any = SimpleNamespace(amqp_uri=amqp_uri, management_uri=management_uri)
    connection = await amqp.connect(amqp.ConnectionOptions(uri=amqp_uri))
    try:
        async with leader(broker, POOL) as activations, asyncio.timeout(PATIENCE):
            await activations.expect(KEY)
            channel, ready = await connection.channel(), 0
            while ready < requests:
                await asyncio.sleep(0.2)
                ready = (await channel.declare_queue(PoolNames(POOL).request_queue(KEY), passive=True)).ready
    except BaseExceptionGroup as error:
        return repr(error)
    finally:
        await connection.close()
    return ""


async def measure(requests: int, megabytes: int) -> None:
    async with EmbeddedBroker() as broker:
        await fill(broker, requests, megabytes * 1_000_000)
        command = [sys.executable, "-m", "tests.benchmarks.large_orphans", "--requests", str(requests)]
        leading = await asyncio.create_subprocess_exec(*command, "--lead", broker.amqp_uri, broker.management_uri)
        await leading.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--lead", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure_logging(level="error")
    if options.lead is None:
        uvloop.run(measure(options.requests, options.megabytes))
        return
    began = time.perf_counter()
    ended = uvloop.run(lead(*options.lead, options.requests))
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    load = os.getloadavg()[0]
    print(f"{highest:.0f} MB at most, {time.perf_counter() - began:.1f} s, load {load:.1f}, {ended or 'term kept'}")


if __name__ == "__main__":
    main()

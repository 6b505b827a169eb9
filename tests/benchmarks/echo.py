"""A warm echo through client and worker runtime, beside the same with aio-pika alone: latency and throughput.

Both sides have a client process, a worker process, a direct exchange and a quorum queue; requests and replies are
confirmed, and a request is acknowledged after its reply. They take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from osrdyne import amqp
from osrdyne.client import AsyncClient
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from tests.benchmarks.bare_echo import BODY
from tests.benchmarks.blocks import Block, run_block
from tests.benchmarks.figures import Figure, Goal, Round, figure, percentile
from tests.integration.worker_process import stage

KEY = "bench"
BARE_EXCHANGE = BARE_QUEUE = "bare-echo"
ROUNDS = 11
TURNS = 10
"""In every round; short ones, so that what else the machine does falls on both sides alike."""


async def run(broker: EmbeddedBroker) -> list[Figure]:
    """Latency with one call at a time, throughput with 32 in flight; the workers take as many at once."""
    one = await _rounds(broker, pool="bench_one", in_flight=1, calls=25)
    many = await _rounds(broker, pool="bench_many", in_flight=32, calls=100)
    throughput = [Round(bare.calls_per_second, ours.calls_per_second) for bare, ours in many]
    return [
        _latency("warm echo, p50", one, 50),
        _latency("warm echo, p99", one, 99),
        figure("echo, 32 in flight", "calls/s", throughput, Goal(0.85, at_least=True)),
    ]


def _latency(name: str, blocks: list[tuple[Block, Block]], percent: int) -> Figure:
    rounds = [Round(percentile(bare.latencies, percent), percentile(ours.latencies, percent)) for bare, ours in blocks]
    return figure(name, "ms", rounds, Goal(1.25))


async def _rounds(broker: EmbeddedBroker, *, pool: str, in_flight: int, calls: int) -> list[tuple[Block, Block]]:
    """What the floor and ours did in every round; the first round only warms up. `calls` are made in a turn."""
    async with AsyncExitStack() as stack:
        bare = await stack.enter_async_context(_bare(broker, prefetch=in_flight))
        ours = await stack.enter_async_context(stage(broker.amqp_uri, pool, KEY))
        await ours.start(runtime={"concurrency": in_flight})
        client = await stack.enter_async_context(AsyncClient(broker.amqp_uri, pool))
        rounds = []
        for _ in range(ROUNDS + 1):
            floor = mine = Block([], 0.0)
            for _ in range(TURNS):
                floor += await bare.block(calls, in_flight)
                mine += await run_block(partial(_call, client), calls=calls, in_flight=in_flight)
            rounds.append((floor, mine))
        return rounds[1:]


async def _call(client: AsyncClient) -> None:
    reply = await client.call(KEY, "/echo", BODY, timeout=60)
    assert reply.body == BODY


@dataclass(frozen=True, slots=True)
class _BareClient:
    process: asyncio.subprocess.Process

    async def block(self, calls: int, in_flight: int) -> Block:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{calls} {in_flight}\n".encode())
        return Block(**json.loads(await self.process.stdout.readline()))


@asynccontextmanager
async def _bare(broker: EmbeddedBroker, *, prefetch: int) -> AsyncIterator[_BareClient]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri, name="osrdyne bench"))
    try:
        channel = await connection.channel()
        await channel.declare_exchange(BARE_EXCHANGE, "direct")
        await channel.declare_queue(BARE_QUEUE, arguments={"x-queue-type": "quorum"})
        await channel.bind_queue(BARE_QUEUE, BARE_EXCHANGE, KEY)
    finally:
        await connection.close()
    worker = await _process(broker, "worker", BARE_QUEUE, str(prefetch))
    client = await _process(broker, "client", BARE_EXCHANGE, KEY)
    try:
        yield _BareClient(client)
    finally:
        for process in (client, worker):
            process.kill()
            await process.wait()


async def _process(broker: EmbeddedBroker, *arguments: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.benchmarks.bare_echo",
        *arguments,
        env={**os.environ, "BARE_AMQP_URI": broker.amqp_uri},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n", "the floor did not start"
    return process

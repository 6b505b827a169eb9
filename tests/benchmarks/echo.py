"""A warm echo through client and worker runtime, beside the same with aio-pika alone: latency and throughput.

Both sides have a client process, a worker process, a direct exchange and a quorum queue; requests and replies are
confirmed, and a request is acknowledged after its reply. They take turns.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial

from osrdyne.client import AsyncClient
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from tests.benchmarks.bare import BODY
from tests.benchmarks.blocks import Block, run_block
from tests.benchmarks.figures import Figure, Goal, Round, compared_percentiles, figure
from tests.benchmarks.harness import QUORUM, bare_program, line_of, own_channel
from tests.integration.worker_process import stage

KEY = "bench"
BARE = "bare-echo"
ROUNDS = 11
TURNS = 10
"""In every round; short ones, so that what else the machine does falls on both sides alike."""


async def run(broker: EmbeddedBroker) -> list[Figure]:
    """Latency with one call at a time, throughput with 32 in flight; the workers take as many at once."""
    one = await _rounds(broker, pool="bench_one", in_flight=1, calls=25)
    many = await _rounds(broker, pool="bench_many", in_flight=32, calls=100)
    throughput = [Round(bare.calls_per_second, ours.calls_per_second) for bare, ours in many]
    latencies = [(bare.latencies, ours.latencies) for bare, ours in one]
    return [
        *compared_percentiles("warm echo", "ms", latencies, dict.fromkeys((50, 99), Goal(1.25))),
        figure("echo, 32 in flight", "calls/s", throughput, Goal(0.85, at_least=True)),
    ]


async def _rounds(broker: EmbeddedBroker, *, pool: str, in_flight: int, calls: int) -> list[tuple[Block, Block]]:
    """What the floor and ours did in every round; the first round only warms up. `calls` are made in a turn."""
    async with own_channel(broker) as channel:
        await channel.declare_exchange(BARE, "direct")
        await channel.declare_queue(BARE, arguments=QUORUM)
        await channel.bind_queue(BARE, BARE, KEY)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(bare_program(broker, "work", BARE, str(in_flight)))
        caller = await stack.enter_async_context(bare_program(broker, "ask", BARE, KEY))
        ours = await stack.enter_async_context(stage(broker.amqp_uri, pool, KEY))
        await ours.start(runtime={"concurrency": in_flight})
        client = await stack.enter_async_context(AsyncClient(broker.amqp_uri, pool))
        rounds = []
        for _ in range(ROUNDS + 1):
            floor = mine = Block([], 0.0)
            for _ in range(TURNS):
                floor += await _bare_block(caller, calls, in_flight)
                mine += await run_block(partial(_call, client), calls=calls, in_flight=in_flight)
            rounds.append((floor, mine))
        return rounds[1:]


async def _call(client: AsyncClient) -> None:
    reply = await client.call(KEY, "/echo", BODY, timeout=60)
    assert reply.body == BODY


async def _bare_block(caller: asyncio.subprocess.Process, calls: int, in_flight: int) -> Block:
    assert caller.stdin is not None
    caller.stdin.write(f"{calls} {in_flight}\n".encode())
    return Block(**json.loads(await line_of(caller)))

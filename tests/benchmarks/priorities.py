"""Throughput of a worker whose group has ten priority levels beside the same worker with one level.

Both take requests of 100 ms that wait in their queues, spread evenly over the levels, with the same `concurrency`. They
take turns.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import PRIORITIES, QueueName
from tests.benchmarks.figures import Figure, Goal, Round, figure
from tests.integration.worker_process import Stage, stage

CONCURRENCIES = (1, 4, 8)
ROUNDS = 5
SECONDS = 0.1
"""That a request takes."""
REQUESTS = 20
"""For each place of the worker, in a round."""


async def run(broker: EmbeddedBroker) -> list[Figure]:
    return [await _figure(broker, concurrency) for concurrency in CONCURRENCIES]


async def _figure(broker: EmbeddedBroker, concurrency: int) -> Figure:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(stage(broker.amqp_uri, f"bench_one_level_{concurrency}"))
        ten = await stack.enter_async_context(stage(broker.amqp_uri, f"bench_ten_levels_{concurrency}"))
        levels = tuple(ten.names.request_queue(ten.key, priority) for priority in reversed(PRIORITIES))
        for queue in levels:
            await ten.declare_request_queue(queue)
        base = (one.names.request_queue(one.key),)
        await one.start(runtime={"concurrency": concurrency})
        await ten.start(runtime={"concurrency": concurrency}, queues=levels)
        rounds = []
        for _ in range(ROUNDS + 1):
            floor = await _rate(one, base, REQUESTS * concurrency)
            rounds.append(Round(floor, await _rate(ten, levels, REQUESTS * concurrency)))
    name = f"ten levels, concurrency {concurrency}"
    return figure(name, "req/s", rounds[1:], Goal(0.9, at_least=True))  # the first round warms up


async def _rate(pool: Stage, queues: Sequence[QueueName], requests: int) -> float:
    """Requests a second, from the first publish to the last answer."""
    began, body, turns = time.perf_counter(), {"seconds": SECONDS}, itertools.cycle(queues)
    asked = zip(range(requests), turns, strict=False)
    sent = await asyncio.gather(*(pool.caller.send("/sleep", body, queue=queue) for _, queue in asked))
    responses = await asyncio.gather(*map(pool.caller.answer, sent))
    assert all(response.status == "ok" for response in responses)
    return requests / (time.perf_counter() - began)

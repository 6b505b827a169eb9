"""From the start of the daemon's process to the first answer, in a pool that exists: `osrdyne run` as its users run it.

The queue of the request exists and is not bound; the benchmark itself consumes it and answers, because the start of a
worker would hide the rest.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from osrdyne import amqp
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.harness import NEVER, PATIENCE, bare_program, connection, noop_daemon, own_channel, own_directory

POOL = "bench_start"
NAMES = PoolNames(POOL)
GROUPS = 20
"""Of the pool when the daemon starts; each has a bound queue."""
ROUNDS = 7
SETTINGS = {
    "broker": {"leader_heartbeat": "2s"},
    "lifecycle": {"unbind_delay": NEVER, "stop_delay": NEVER},
    "log": {"level": "info"},
}


async def run(broker: EmbeddedBroker) -> list[Figure]:
    with own_directory() as directory:
        bench = _Bench(broker, directory)
        await bench.prepare()
        rounds = [await bench.round() for _ in range(ROUNDS)]
    return [figure("daemon start to first answer", "ms", rounds, Goal(1000, Comparison.ABSOLUTE))]


class _Bench:
    def __init__(self, broker: EmbeddedBroker, directory: Path) -> None:
        self._broker = broker
        self._daemon = noop_daemon(broker, directory, POOL, SETTINGS, forked=False)
        self._number = 0

    async def prepare(self) -> None:
        """Have the daemon make the pool, and groups in it."""
        await self._daemon.start()
        await self._daemon.close()
        async with own_channel(self._broker) as channel:
            for number in range(GROUPS):
                await _declare(channel, key := Key(f"there={number}"))
                await channel.bind_queue(NAMES.request_queue(key), NAMES.requests_exchange, key)

    async def round(self) -> Round:
        floor = await self._measure(self._bare)
        return Round(floor * 1000, await self._measure(self._ours) * 1000)

    async def _measure(self, running: Callable[[Key], AbstractAsyncContextManager[None]]) -> float:
        """Seconds from the start of a process to the answer."""
        self._number += 1
        key = Key(f"first={self._number}")
        async with connection(self._broker) as own:
            channel = await own.channel()
            await _declare(channel, key)
            answers = await _answer_requests(own, key)
            began = time.perf_counter()
            async with running(key):
                await asyncio.wait_for(answers.get(), PATIENCE)
                took = time.perf_counter() - began
            await channel.delete_queue(NAMES.request_queue(key))
        return took

    @asynccontextmanager
    async def _ours(self, _: Key) -> AsyncIterator[None]:
        """Ended in order: killed before it has acknowledged the orphan, it would leave it to the next program."""
        self._daemon.launch()
        try:
            yield
        finally:
            await self._daemon.stop()
            await self._daemon.close()

    @asynccontextmanager
    async def _bare(self, key: Key) -> AsyncIterator[None]:
        arguments = ("pass-on", NAMES.orphan_queue, NAMES.requests_exchange, NAMES.request_queue(key))
        async with bare_program(self._broker, *arguments, ready=False) as process:
            yield
            await asyncio.wait_for(process.wait(), PATIENCE)


async def _answer_requests(own: amqp.Connection, key: Key) -> amqp.Consumer:
    """Publish a request for the key, and answer it when it has come to its queue; the consumer of the answer."""
    caller, worker = await own.channel(confirms=True), await own.channel()
    reply_to = f"{POOL}_bench-answers"
    await caller.declare_queue(reply_to)
    answers = await caller.consume(reply_to, no_ack=True)
    requests = await worker.consume(NAMES.request_queue(key), no_ack=True)

    async def answer() -> None:
        request = await requests.get()
        await worker.publish(amqp.Message(), exchange="", routing_key=request.properties.reply_to or "")

    asyncio.get_running_loop().create_task(answer())  # ends with the request, or with its connection
    await caller.publish(amqp.Message(reply_to=reply_to), exchange=NAMES.requests_exchange, routing_key=key)
    return answers


async def _declare(channel: amqp.Channel, key: Key) -> None:
    await channel.declare_queue(NAMES.request_queue(key), arguments=request_queue_arguments(NAMES, key))

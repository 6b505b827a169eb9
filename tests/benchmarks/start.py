"""From the start of the daemon's process to the first answer, in a pool that exists: `osrdyne run` as its users run it.

The request was published before the process starts. Its queue exists and is not bound, and the benchmark itself
consumes it and answers, because the start of a worker would hide the rest. The floor is a bare program that connects,
binds the queue and gives it the request.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from osrdyne import amqp
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames
from tests.acceptance.daemon_process import DaemonProcess
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure

POOL = "bench_start"
GROUPS = 20
"""Of the pool when the daemon starts; each has a bound queue."""
ROUNDS = 7
PATIENCE = 120.0
NEVER = "1d"
SETTINGS = {
    "broker": {"leader_heartbeat": "2s"},
    "lifecycle": {"unbind_delay": NEVER, "stop_delay": NEVER},
    "log": {"level": "info"},
}


async def run(broker: EmbeddedBroker) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="osrdyne-bench-") as directory:
        bench = _Bench(broker, Path(directory))
        await bench.prepare()
        rounds = [await bench.round() for _ in range(ROUNDS)]
    return [figure("daemon start to first answer", "ms", rounds, Goal(1000, Comparison.ABSOLUTE))]


class _Bench:
    def __init__(self, broker: EmbeddedBroker, directory: Path) -> None:
        self._broker = broker
        self._names = PoolNames(POOL)
        self._daemon = DaemonProcess(
            directory, amqp_uri=broker.amqp_uri, management_uri=broker.management_uri, pool=POOL, settings=SETTINGS
        )
        self._daemon.settings["driver"] = {"name": "noop"}
        self._daemon.write_settings()
        self._number = 0

    async def prepare(self) -> None:
        """Have the daemon make the pool, and groups in it."""
        await self._daemon.start()
        await self._daemon.close()
        connection = await self._connect()
        try:
            channel = await connection.channel()
            for number in range(GROUPS):
                await self._declare(channel, key := Key(f"there={number}"))
                await channel.bind_queue(self._names.request_queue(key), self._names.requests_exchange, key)
        finally:
            await connection.close()

    async def round(self) -> Round:
        floor = await self._measure(self._bare)
        return Round(floor * 1000, await self._measure(self._ours) * 1000)

    async def _measure(self, start: Callable[[Key], Awaitable[Callable[[], Awaitable[None]]]]) -> float:
        """Seconds from the start of a process to the answer."""
        self._number += 1
        key, connection = Key(f"first={self._number}"), await self._connect()
        try:
            channel = await connection.channel()
            await self._declare(channel, key)
            answers = await self._answer_requests(connection, key)
            began = time.perf_counter()
            end = await start(key)
            try:
                await asyncio.wait_for(answers.get(), PATIENCE)
                took = time.perf_counter() - began
            finally:
                await end()
            await channel.delete_queue(self._names.request_queue(key))
        finally:
            await connection.close()
        return took

    async def _answer_requests(self, connection: amqp.Connection, key: Key) -> amqp.Consumer:
        """Publish a request for the key, and answer it when it has come to its queue; the consumer of the answer."""
        caller, worker = await connection.channel(confirms=True), await connection.channel()
        reply_to = f"{POOL}_bench-answers"
        await caller.declare_queue(reply_to)
        answers = await caller.consume(reply_to, no_ack=True)
        requests = await worker.consume(self._names.request_queue(key), no_ack=True)

        async def answer() -> None:
            request = await requests.get()
            await worker.publish(amqp.Message(), exchange="", routing_key=request.properties.reply_to or "")

        asyncio.get_running_loop().create_task(answer())  # ends with the request, or with its connection
        message = amqp.Message(reply_to=reply_to)
        await caller.publish(message, exchange=self._names.requests_exchange, routing_key=key)
        return answers

    async def _ours(self, _: Key) -> Callable[[], Awaitable[None]]:
        self._daemon.launch()
        return self._end_daemon

    async def _end_daemon(self) -> None:
        """In order: killed before it has acknowledged the orphan, it would leave it to the next program."""
        await self._daemon.stop()
        await self._daemon.close()

    async def _bare(self, key: Key) -> Callable[[], Awaitable[None]]:
        names = self._names
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.benchmarks.bare_start",
            names.orphan_queue,
            names.requests_exchange,
            names.request_queue(key),
            env={**os.environ, "BARE_AMQP_URI": self._broker.amqp_uri},
        )

        async def end() -> None:
            await asyncio.wait_for(process.wait(), PATIENCE)

        return end

    async def _declare(self, channel: amqp.Channel, key: Key) -> None:
        await channel.declare_queue(self._names.request_queue(key), arguments=request_queue_arguments(key))

    async def _connect(self) -> amqp.Connection:
        return await amqp.connect(amqp.ConnectionOptions(uri=self._broker.amqp_uri, name="osrdyne bench"))

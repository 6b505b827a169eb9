"""What benchmarks share: connections, daemons that start no workers, and floors that aio-pika alone makes."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aio_pika
from aio_pika.abc import AbstractIncomingMessage
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.config.models import BrokerSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from tests.acceptance.daemon_process import DaemonProcess, until
from tests.benchmarks.bare import READY
from tests.benchmarks.leading import Broker
from tests.connections import connected

PATIENCE = 300.0
"""Seconds for anything that must happen; a benchmark that needs them has failed."""
AT_ONCE = 500
"""Messages in flight where a queue is filled."""
NEVER = "1d"
QUORUM = {"x-queue-type": "quorum"}


def settings_of(broker: EmbeddedBroker) -> BrokerSettings:
    return BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))


@contextmanager
def own_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="osrdyne-bench-") as directory:
        yield Path(directory)


def connection(broker: Broker) -> AbstractAsyncContextManager[amqp.Connection]:
    return connected(broker.amqp_uri, name="osrdyne bench", rpc_timeout=PATIENCE)


@asynccontextmanager
async def own_channel(broker: Broker) -> AsyncIterator[amqp.Channel]:
    """A channel with a connection of its own that does not outlive it: a consumer would go on taking requests."""
    async with connection(broker) as own:
        yield await own.channel(confirms=True)


async def publish_all(count: int, publish: Callable[[int], Awaitable[object]]) -> None:
    """Publish messages by their numbers, so many at once."""
    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*map(publish, range(start, min(start + AT_ONCE, count))))


def noop_daemon(
    broker: EmbeddedBroker, directory: Path, pool: str, settings: Mapping[str, Any], *, forked: bool = True
) -> DaemonProcess:
    """A daemon that starts no workers. One that is not `forked` starts as its users start it, with all its imports."""
    directory.mkdir(exist_ok=True)
    at = {"amqp_uri": broker.amqp_uri, "management_uri": broker.management_uri}
    launcher = () if forked else (sys.executable,)
    return DaemonProcess(
        directory, **at, pool=pool, settings={**settings, "driver": {"name": "noop"}}, launcher=launcher
    )


async def until_standing_by(daemon: DaemonProcess) -> None:
    async def stands_by() -> bool:
        ready = await daemon.get("/ready")
        return bool(ready.get("ready")) and ready["role"] == "standby"

    await until(stands_by, "the daemon stands by", interval=0.1)
    await asyncio.sleep(0.5)  # for its consumer


@asynccontextmanager
async def leader_and_standby(
    broker: EmbeddedBroker, directory: Path, pool: str, settings: Mapping[str, Any]
) -> AsyncIterator[tuple[DaemonProcess, DaemonProcess]]:
    first, second = (noop_daemon(broker, directory / name, pool, settings) for name in ("first", "second"))
    try:
        await first.start()
        second.launch()
        await until_standing_by(second)
        yield first, second
    finally:
        for daemon in (first, second):
            await daemon.close()


# --- floors


@asynccontextmanager
async def bare_program(
    broker: EmbeddedBroker, *arguments: str, ready: bool = True
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program of `bare`, which is killed at the end."""
    command = (sys.executable, "-m", "tests.benchmarks.bare", *arguments)
    environment, pipe = {**os.environ, "BARE_AMQP_URI": broker.amqp_uri}, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe, limit=2**24)
    try:
        assert not ready or await line_of(process) == READY, "the floor did not start"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def bare_forward(
    broker: EmbeddedBroker,
    source: str,
    copy: Callable[[AbstractIncomingMessage], tuple[aio_pika.Message, str]],
    *,
    exchange: str,
    prefetch: int,
    count: int,
) -> float:
    """Messages a second that are consumed, published with a confirm, and acknowledged after it. `copy` returns what is
    published, and its routing key."""
    async with await aio_pika.connect(broker.amqp_uri) as bare:
        channel = await bare.channel()
        target = await channel.get_exchange(exchange) if exchange else channel.default_exchange
        consuming = await bare.channel()
        await consuming.set_qos(prefetch)
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        left, began = count, 0.0

        async def pass_on(message: AbstractIncomingMessage) -> None:
            nonlocal left, began
            began = began or time.perf_counter()
            copied, routing_key = copy(message)
            await target.publish(copied, routing_key=routing_key)
            await message.ack()
            left -= 1
            if left == 0:
                done.set_result(time.perf_counter())

        await (await consuming.get_queue(source)).consume(pass_on)
        ended = await asyncio.wait_for(done, PATIENCE)
    return count / (ended - began)

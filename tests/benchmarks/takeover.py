"""The time without a leader: it is killed or falls silent while orphans come in, and a hot standby takes over.

Two daemon processes take turns. The floor of a killed leader is a bare hand-over: a process that holds the message of
such a queue is killed, and the next one gets it. That of a silent one is what it takes RabbitMQ to notice.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from osrdyne import amqp
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import Key, PoolNames
from tests.acceptance.daemon_process import DaemonProcess, until
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.benchmarks.harness import (
    NEVER,
    QUORUM,
    bare_program,
    connection,
    leader_and_standby,
    line_of,
    own_channel,
    own_directory,
    until_standing_by,
)

POOL = "bench_takeover"
BARE_QUEUE = "bare-token"
HEARTBEAT = 2.0
KILLS, SILENCES = 5, 3
PACE = 0.05
"""Seconds between two requests, each for a key of its own."""
BEFORE, AFTER = 2.0, 1.0
"""Seconds of load before the fault, and after the first request that the new leader has forwarded."""
SETTINGS = {
    "broker": {"leader_heartbeat": f"{HEARTBEAT:g}s"},
    "lifecycle": {"unbind_delay": NEVER, "stop_delay": NEVER, "resync_interval": NEVER, "max_groups": 1_000_000},
    "log": {"level": "warning"},
}


@dataclass(frozen=True, slots=True)
class Takeover:
    """Seconds from the fault on, but for `waits`: those of the requests of the round, from publish to arrival."""

    token: float
    forwarded: float
    waits_before: float
    waits: float


async def run(broker: EmbeddedBroker) -> list[Figure]:
    with own_directory() as directory:
        async with leader_and_standby(broker, directory, POOL, SETTINGS) as daemons, connection(broker) as own:
            match = _Match(daemons, _Load(own, await own.channel(confirms=True)))
            await match.round(signal.SIGKILL)  # warms up
            bare = await _bare_handovers(broker, KILLS)
            killed = [await match.round(signal.SIGKILL) for _ in range(KILLS)]
            silent = [await match.round(signal.SIGSTOP) for _ in range(SILENCES)]
    kills, floor = list(zip(bare, killed, strict=True)), 3 * HEARTBEAT

    def compared(name: str, rounds: Iterable[tuple[float, float]], goal: Goal) -> Figure:
        return figure(f"leader {name}", "ms", [Round(before * 1000, after * 1000) for before, after in rounds], goal)

    second = Goal(1000, Comparison.DIFFERENCE)
    return [
        compared("killed, next one has the token", ((before, one.token) for before, one in kills), second),
        compared("killed, first orphan forwarded", ((before, one.forwarded) for before, one in kills), second),
        compared("killed, longest wait", ((one.waits_before, one.waits) for one in killed), second),
        compared("silent, next one has the token", ((floor, one.token) for one in silent), Goal(1.0)),
        compared("silent, longest wait", ((floor, one.waits) for one in silent), Goal(1.5)),
    ]


class _Match:
    """Two daemons, one of which leads."""

    def __init__(self, daemons: Sequence[DaemonProcess], load: _Load) -> None:
        self._leader, self._standby = daemons
        self._load = load

    async def round(self, fault: signal.Signals) -> Takeover:
        """Kill or stop the leader under load; afterwards it stands by."""
        old, new = self._leader, self._standby
        async with self._load.requests() as requests:
            await asyncio.sleep(BEFORE)
            at = time.time()
            old.kill() if fault is signal.SIGKILL else old.send_signal(fault)
            forwarded = await requests.first_arrival_of_those_after(at)
            await asyncio.sleep(AFTER)
        since = float((await new.get("/v1/leadership"))["since"])
        old.launch() if fault is signal.SIGKILL else old.send_signal(signal.SIGCONT)
        await until_standing_by(old)
        self._leader, self._standby = new, old
        before, after = requests.longest_waits(at)
        return Takeover(token=since - at, forwarded=forwarded - at, waits_before=before, waits=after)


# --- the load


@dataclass(slots=True)
class _Requests:
    """When each request of a round was published, and when it arrived."""

    sent: dict[Key, float] = field(default_factory=dict)
    arrived: dict[Key, float] = field(default_factory=dict)

    async def first_arrival_of_those_after(self, at: float) -> float:
        """Wait for it. What was published after the fault can have been forwarded by the new leader only."""

        def arrivals() -> list[float]:
            return [arrived for key, arrived in self.arrived.items() if self.sent[key] > at]

        return min(await until(arrivals, "the new leader forwards a request", interval=0.01))

    def longest_waits(self, at: float) -> tuple[float, float]:
        """Of those that had arrived by then, and of the others."""
        before = [arrived - self.sent[key] for key, arrived in self.arrived.items() if arrived <= at]
        after = [arrived - self.sent[key] for key, arrived in self.arrived.items() if arrived > at]
        return max(before), max(after)


class _Load:
    """Requests, each for a new key whose queue is there and not bound: every one is an orphan."""

    def __init__(self, connection: amqp.Connection, publisher: amqp.Channel) -> None:
        self._connection = connection
        self._publisher = publisher
        self._numbers = itertools.count(1)
        self._names = PoolNames(POOL)

    @asynccontextmanager
    async def requests(self) -> AsyncIterator[_Requests]:
        """Requests at a steady pace until the end of the block, which waits until all of them have arrived."""
        requests, over = _Requests(), asyncio.Event()
        channel = await self._connection.channel()
        async with asyncio.TaskGroup() as group:

            async def keep_asking() -> None:
                while not over.is_set():
                    key = Key(f"infra={next(self._numbers)}")
                    group.create_task(self._ask(channel, requests, key))
                    await asyncio.sleep(PACE)

            group.create_task(keep_asking())
            yield requests
            over.set()
        for key in requests.sent:
            await channel.delete_queue(self._names.request_queue(key))
        await channel.close()

    async def _ask(self, channel: amqp.Channel, requests: _Requests, key: Key) -> None:
        queue = self._names.request_queue(key)
        await channel.declare_queue(queue, arguments=request_queue_arguments(self._names, key))
        consumer = await channel.consume(queue, prefetch=1)
        requests.sent[key] = time.time()
        await self._publisher.publish(amqp.Message(), exchange=self._names.requests_exchange, routing_key=key)
        await (await consumer.get()).ack()
        requests.arrived[key] = time.time()


# --- the floor


async def _bare_handovers(broker: EmbeddedBroker, count: int) -> list[float]:
    """Seconds from the end of a process that holds the message until the next one has it."""
    async with own_channel(broker) as channel:
        arguments = QUORUM | {"x-single-active-consumer": True, "x-delivery-limit": 1_000_000}
        await channel.declare_queue(BARE_QUEUE, arguments=arguments)
        await channel.publish(amqp.Message(), exchange="", routing_key=BARE_QUEUE)
    async with AsyncExitStack() as stack:
        holders = [await stack.enter_async_context(bare_program(broker, "hold", BARE_QUEUE)) for _ in range(count + 1)]
        await line_of(holders[0])
        return [await _bare_handover(before, after) for before, after in pairwise(holders)]


async def _bare_handover(before: asyncio.subprocess.Process, after: asyncio.subprocess.Process) -> float:
    at = time.time()
    before.kill()
    return float(await line_of(after)) - at

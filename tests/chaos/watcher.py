"""Watch the pool while it is attacked, and list what is left in the end."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from osrdyne.protocol.names import PoolNames
from tests.acceptance.daemon_process import DaemonProcess
from tests.chaos.beside import beside
from tests.chaos.checker import LEADER_TIME, Aftermath
from tests.chaos.nodes import managing
from tests.chaos.pool import POOL, PoolUnderAttack
from tests.connections import connected

INTERVAL = 0.2
TOLERATED = 15.0
"""Seconds for which two daemons may believe that they lead: one that was cut off or stopped notices it within three
heartbeats, on a busy machine somewhat later. It does nothing meanwhile: a second worker for a key would show that it
does."""
BOTH_SEEN = 10.0
"""Seconds within which the leader must have ended the later of two workers of a key."""
NAMES = PoolNames(POOL)
EMPTY = (NAMES.orphan_queue, NAMES.dead_letter_queue)


def _should_be_empty(queue: str) -> bool:
    return queue in EMPTY or queue.startswith(NAMES.retry_queue_prefix)


class Watcher:
    def __init__(self, pool: PoolUnderAttack) -> None:
        self._pool = pool
        self._twins: list[str] = []
        self._two_leaders: list[str] = []
        self._leaderless: list[tuple[float, float]] = []
        self._twice: dict[str, float] = {}
        self._ended: set[str] = set()

    def watching(self) -> AbstractAsyncContextManager[None]:
        return beside(self._watch_workers(), self._watch_leaders())

    async def _watch_workers(self) -> None:
        before: set[tuple[str, int]] = set()
        while True:
            seen = set(await asyncio.to_thread(self._pool.workers))
            # Who was seen twice was alive all the time between, and so beside everybody seen the first time.
            both = before & seen
            pids = {key: sorted(pid for other, pid in both if other == key) for key, _ in both}
            self._twins += [f"{key[:20]!r} {found}" for key, found in pids.items() if len(found) > 1]
            before = seen
            await self._watch_keys()
            await asyncio.sleep(INTERVAL)

    async def _watch_keys(self) -> None:
        """Keys of pooled workers in two processes. A deposed leader may have started one of them late: the leader ends
        it when it sees both."""
        now = asyncio.get_running_loop().time()
        found = await self._pool.keys_twice()
        self._twice = {key: self._twice.get(key, now) for key in found}
        self._twins += [
            f"{key[:20]!r} in two processes" for key, since in self._twice.items() if now - since > BOTH_SEEN
        ]

    async def _watch_leaders(self) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        led = time.time()
        while True:
            self._ended |= {one.directory.name for one in self._pool.daemons if self._has_ended(one)}
            leaders = len(await self._pool.leaders())
            if leaders:
                self._leaderless += [(led, time.time())] if time.time() - led > LEADER_TIME else []
                led = time.time()
            if leaders < 2:
                since = loop.time()
            elif loop.time() - since > TOLERATED:
                self._two_leaders.append(f"for {loop.time() - since:.0f} s")
            await asyncio.sleep(INTERVAL)

    def _has_ended(self, daemon: DaemonProcess) -> bool:
        return not daemon.is_running and daemon not in self._pool.killed

    async def until_idle(self, *, timeout: float) -> Aftermath:
        """What was seen when nothing of a group was left, or the time was over.

        One look is not enough: a proof of the leader may be on its way through one of its queues."""
        until = asyncio.get_running_loop().time() + timeout
        while True:
            found = await self._aftermath()
            is_idle = not (found.queues or found.workers or found.groups or found.messages) and found.leaders == 1
            if is_idle or asyncio.get_running_loop().time() > until:
                return found
            await asyncio.sleep(1)

    async def _aftermath(self) -> Aftermath:
        leaders = await self._pool.leaders()
        messages = await self._messages()
        return Aftermath(
            queues=[name for name in messages if name.startswith((f"{POOL}-req-", f"{POOL}-ctl-"))],
            messages={name: count for name, count in messages.items() if count and _should_be_empty(name)},
            workers=[f"{key[:20]!r} {pid}" for key, pid in self._pool.workers()],
            groups=[key for leader in leaders for key in await leader.groups()],
            leaders=len(leaders),
            poison=await self._poison(),
            twins=self._twins,
            two_leaders=self._two_leaders,
            leaderless=self._leaderless,
            tracebacks=self._pool.logs_with_tracebacks(),
            ended=sorted(self._ended),
        )

    async def _messages(self) -> Counter[str]:
        """Messages in each queue of the pool."""
        async with managing(self._pool.broker) as client:
            return Counter({queue.name: queue.messages for queue in await client.list_queues(f"{POOL}-")})

    async def _poison(self) -> Sequence[str]:
        """Correlation ids in the inventory; everything stays there."""
        async with connected(self._pool.broker.amqp_uri) as connection:
            channel, found = await connection.channel(), []
            while (entry := await channel.get(NAMES.poison_queue)) is not None:
                found.append(entry.properties.correlation_id or "")
            return found

"""Looks at the pool while it is attacked, and at what is left of it in the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.broker.management import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.protocol.names import PoolNames
from tests.chaos.checker import Aftermath
from tests.chaos.pool import POOL, PoolUnderAttack

INTERVAL = 0.3
TOLERATED_LOOKS = 3
"""So many looks in a row may find two leaders: one that was stopped has to notice first what it has lost. It does
nothing meanwhile; that is tested elsewhere (`tests/integration/test_leader_token.py`)."""
NAMES = PoolNames(POOL)
EMPTY = (NAMES.orphan_queue, NAMES.dead_letter_queue)


class Watcher:
    def __init__(self, pool: PoolUnderAttack) -> None:
        self._pool = pool
        self._twins: list[str] = []
        self._two_leaders: list[str] = []

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._watch_workers()), group.create_task(self._watch_leaders())]
            yield
            for task in tasks:
                task.cancel()

    async def _watch_workers(self) -> None:
        while True:
            workers = await asyncio.to_thread(self._pool.workers)
            pids = {key: [pid for other, pid in workers if other == key] for key, _ in workers}
            self._twins += [f"{key[:20]!r} {found}" for key, found in pids.items() if len(found) > 1]
            await asyncio.sleep(INTERVAL)

    async def _watch_leaders(self) -> None:
        in_a_row = 0
        while True:
            in_a_row = in_a_row + 1 if len(await self._pool.leaders()) > 1 else 0
            if in_a_row > TOLERATED_LOOKS:
                self._two_leaders.append(f"for {in_a_row} looks in a row")
            await asyncio.sleep(INTERVAL)

    async def until_idle(self, *, timeout: float) -> None:
        """Wait until nothing of a group is left, or the time is over: then `aftermath` shows it."""
        until = asyncio.get_running_loop().time() + timeout
        while asyncio.get_running_loop().time() < until:
            found = await self.aftermath()
            if not (found.queues or found.workers or found.groups or found.messages) and found.leaders == 1:
                return
            await asyncio.sleep(1)

    async def aftermath(self) -> Aftermath:
        leaders = await self._pool.leaders()
        messages = await self._messages()
        return Aftermath(
            queues=[name for name in messages if name.startswith((f"{POOL}-req-", f"{POOL}-ctl-"))],
            messages={name: messages.get(name, 0) for name in EMPTY if messages.get(name)},
            workers=[f"{key[:20]!r} {pid}" for key, pid in self._pool.workers()],
            groups=[key for leader in leaders for key in await leader.groups()],
            leaders=len(leaders),
            poison=await self._poison(),
            twins=self._twins,
            two_leaders=self._two_leaders,
            tracebacks=[*self._pool.logs_with_tracebacks()],
            ended=[daemon.directory.name for daemon in self._pool.daemons if not daemon.is_running],
        )

    async def _messages(self) -> Counter[str]:
        """Messages in each queue of the pool."""
        broker = self._pool.broker
        settings = BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))
        async with ManagementClient(settings) as client:
            return Counter({queue.name: queue.messages for queue in await client.list_queues(f"{POOL}-")})

    async def _poison(self) -> Sequence[str]:
        """Correlation ids in the inventory; everything stays there."""
        connection = await amqp.connect(amqp.ConnectionOptions(uri=self._pool.broker.amqp_uri))
        try:
            channel = await connection.channel()
            found = []
            while (entry := await channel.get(NAMES.poison_queue)) is not None:
                found.append(entry.properties.correlation_id or "")
            return found
        finally:
            await connection.close()

"""A leader at work, on the broker in memory or on RabbitMQ: what suites for both run on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.session import Connect, LeaderSession
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.config.models import Settings
from osrdyne.protocol.names import PoolNames
from osrdyne.testing.fakes.broker import FakeBroker


@dataclass
class LeaderTerm:
    """`memory`: the broker, if it is the one in memory."""

    settings: Settings
    session: LeaderSession
    management: ManagementClient
    keeping: asyncio.Task[None]
    connect: Connect
    memory: FakeBroker | None
    opened: list[amqp.Connection] = field(default_factory=list)

    @property
    def names(self) -> PoolNames:
        return self.session.names

    async def channel(self, *, confirms: bool = False) -> amqp.Channel:
        """A channel of another process."""
        uri = self.settings.broker.uri.get_secret_value()
        self.opened.append(await self.connect(amqp.ConnectionOptions(uri=uri, name="osrdyne contract test")))
        return await self.opened[-1].channel(confirms=confirms)


Lead = Callable[[], AbstractAsyncContextManager[LeaderTerm]]
"""Begins a term; the one before must have ended."""


@asynccontextmanager
async def leading(
    settings: Settings, connect: Connect, management: ManagementClient, memory: FakeBroker | None = None
) -> AsyncIterator[LeaderTerm]:
    async with LeaderSession(settings, clock=SystemClock(), connect=connect) as session:
        _, token = await session.token.acquire()
        await session.declare(pool_topology(settings.pool.id))
        term = LeaderTerm(settings, session, management, asyncio.create_task(session.run(token)), connect, memory)
        try:
            yield term
        finally:
            term.keeping.cancel()
            await asyncio.gather(term.keeping, return_exceptions=True)
            for connection in term.opened:
                await connection.close()

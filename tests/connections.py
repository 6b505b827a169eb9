"""AMQP connections of tests that need nothing else of a caller."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from osrdyne import amqp
from osrdyne.errors import BrokerError


@asynccontextmanager
async def connected(uri: str, **options: Any) -> AsyncIterator[amqp.Connection]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=uri, **options))
    try:
        yield connection
    finally:
        await connection.close()


async def keep_connected(use: Callable[[amqp.Connection], Awaitable[None]], uri: str, **options: Any) -> None:
    """Use a connection, and a new one whenever it is lost, until this is cancelled."""
    while True:
        with suppress(BrokerError):
            async with connected(uri, **options) as connection:
                await use(connection)
        await asyncio.sleep(0.1)

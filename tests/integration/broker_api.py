"""RabbitMQ's HTTP API in tests: its client, and closing connections as an operator does. And waiting."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx

from osrdyne.amqp import Channel, Connection
from osrdyne.errors import BrokerNotFoundError

PATIENCE = 120.0
"""Seconds for anything that must happen; a test that needs them has failed."""


async def until(found: Callable[[], Any], *, equals: object = ...) -> Any:
    """The first value of this function, or coroutine function, that is true or equals what is wanted."""
    async with asyncio.timeout(PATIENCE):
        while True:
            value = found()
            if inspect.isawaitable(value):
                value = await value
            if value if equals is ... else value == equals:
                return value
            await asyncio.sleep(0.02)


async def ready_in(channel: Channel, queue: str) -> int:
    """How many messages of a queue are ready."""
    return (await channel.declare_queue(queue, passive=True)).ready


async def waiting_in(connection: Connection, queue: str) -> int:
    """The same over a channel of its own; 0 before the queue exists."""
    channel = await connection.channel()
    try:
        return await ready_in(channel, queue)
    except BrokerNotFoundError:  # closes the channel
        return 0
    finally:
        await channel.close()


def http_client(url: str, **options: Any) -> httpx.AsyncClient:
    """A client for a server on this machine."""
    return httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=PATIENCE, **options)


async def listed_connections(api: httpx.AsyncClient, *, name: str = "", user: str | None = None) -> list[str]:
    """What RabbitMQ calls the connections whose own names begin with `name`, of this user."""
    return [
        str(item["name"])
        for item in (await api.get("/api/connections")).raise_for_status().json()
        if item.get("user_provided_name", "").startswith(name) and user in {None, item.get("user")}
    ]


async def close_connection(api: httpx.AsyncClient, listed: str) -> bool:
    """Whether it was still there."""
    return (await api.delete(f"/api/connections/{quote(listed, safe='')}")).is_success


async def close_connections(management_uri: str, *, name: str = "", user: str | None = None) -> None:
    """Close them once RabbitMQ lists one: some seconds after they were opened, and perhaps when they are gone."""
    closed = False
    async with http_client(management_uri) as api, asyncio.timeout(PATIENCE):
        while not closed:
            for listed in await listed_connections(api, name=name, user=user):
                closed = await close_connection(api, listed) or closed
            await asyncio.sleep(0.1)

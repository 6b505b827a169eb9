"""A leader of a managed pool on a broker in memory, with routes in force, and what waits in its queues."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from osrdyne.config.models import PoolSettings, Settings
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.pool.routing.routes import RouteChange
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for

ALERTS = {"route": "FROM /messages/* WHERE level = 'alert' INTO $upstream", "priority": 0, "timeToLiveSecs": 60}
DATA = {"route": "FROM /messages/* WHERE level = 'data' INTO $upstream", "priority": 1}
REST = "FROM /messages/* INTO $upstream"


def managed() -> Settings:
    return settings_for().model_copy(update={"pool": PoolSettings(id=POOL, kind="managed")})


@asynccontextmanager
async def managing(clock: VirtualClock, broker: FakeBroker, **routes: object) -> AsyncIterator[Stack]:
    """A leader of a managed pool, with these routes in force."""
    async with leading(clock, broker=broker, settings=managed()) as stack:
        if routes:
            await change(stack, **routes)
        yield stack


async def change(stack: Stack, **routes: object) -> RouteChange:
    changed = await stack.term.routing.routes.change(load_manifest(json.dumps({"routes": routes})), author="me")
    assert isinstance(changed, RouteChange)
    return changed


def waiting(stack: Stack, priority: int | None, key: str = "a") -> list[bytes]:
    queue = stack.names.request_queue(Key(key), priority)
    return stack.broker.bodies(queue) if queue in stack.broker.queues else []

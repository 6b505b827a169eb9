"""A leader of a managed pool on a broker in memory, with routes in force, and what waits in its queues."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from osrdyne.amqp import Message
from osrdyne.config.models import PoolSettings, Settings
from osrdyne.ingress.explain import Explanation, explain
from osrdyne.ingress.requests import sample_arrival
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.pool.routing.routes import RouteChange
from osrdyne.protocol.control import ControlMessage, control_from_wire
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for

ALERTS = {"route": "FROM /messages/* WHERE level = 'alert' INTO $upstream", "priority": 0, "timeToLiveSecs": 60}
DATA = {"route": "FROM /messages/* WHERE level = 'data' INTO $upstream", "priority": 1}
CONTROL = "control"
REST = "FROM /messages/* INTO $upstream"
TO_B = "FROM /* INTO BrokeredEndpoint('/modules/b/inputs/store')"
COPY = {"route": TO_B, "priority": 4}
"""As a second route, a copy of each request goes to the group b."""


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


async def publish_to(stack: Stack, exchange: str, key: str, body: bytes = b"", **properties: object) -> None:
    """Publish to any exchange, as a client, a worker or an earlier leader, and let the leader process it."""
    message = Message(body=body, **properties)  # type: ignore[arg-type]
    await FakeChannel(stack.broker, confirms=True).publish(message, exchange=exchange, routing_key=key)
    await stack.clock.settle()


async def cancel(stack: Stack, key: str = "a", **properties: object) -> None:
    """Cancel a request as its client does."""
    await publish_to(stack, stack.names.cancel_exchange, key, **properties)


def waiting(stack: Stack, priority: int | None, key: str = "a") -> list[bytes]:
    queue = stack.names.request_queue(Key(key), priority)
    return stack.broker.bodies(queue) if queue in stack.broker.queues else []


async def send(stack: Stack, key: str, body: bytes = b"", **properties: object) -> None:
    """Publish a request, and let the leader process it."""
    await stack.publish(key, body, **properties)
    await stack.clock.settle()


def explained(stack: Stack, key: str, *, principal: str | None = None, **headers: object) -> Explanation:
    """What the leader would do with a request now."""
    arrival = sample_arrival(
        key, "/x", headers=headers, body=None, app_id=None, timeout=None, now=stack.clock.time(), principal=principal
    )
    return explain(
        arrival,
        stack.term.routing.routes.table,
        splitter=None,
        names=stack.names,
        limits=stack.term.routing.routes.ttl_limits,
        checks=stack.term.processors.checks,
        policy_of=stack.term.routing.policies.of,
    )


def listen(stack: Stack, *routing_keys: str) -> None:
    """Receive the control messages of these workers or groups in a queue."""
    stack.broker.declare_queue(CONTROL, {})
    for routing_key in routing_keys:
        stack.broker.bind(CONTROL, stack.names.control_exchange, routing_key)


def heard(stack: Stack) -> list[ControlMessage]:
    """The control messages that have arrived."""
    return [message for body in stack.broker.bodies(CONTROL) if (message := control_from_wire(body)) is not None]

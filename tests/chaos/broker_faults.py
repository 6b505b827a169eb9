"""What clients, operators and scripts do to RabbitMQ itself: messages, policies, imports of definitions, permissions.

All that is repeated until RabbitMQ has taken it, because other faults may stop it meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.models import ListedBinding
from osrdyne.errors import BrokerError
from osrdyne.protocol.names import Key, PoolNames, priority_of
from osrdyne.testing.hostile import LARGE_TABLES, HostileMessage
from tests.acceptance.daemon_process import until
from tests.chaos.callers import KEYS
from tests.chaos.nodes import Node, managing
from tests.chaos.pool import ALL, POOL, PoolUnderAttack
from tests.chaos.schedule import Action, Fault, Target, drawn
from tests.connections import connected
from tests.integration.raw_amqp import raw_publisher

NAMES = PoolNames(POOL)
BURST = 32
HEADERS_FLAG = struct.pack(">H", 1 << 13)
TTL_POLICY = "everything"
TTL_MS = 3000
FOREIGN_PATTERN = "^(?!replies-of-)"
"""An answer that waits for its caller is the caller's own."""
OPERATOR_PATTERN = rf"^(?!replies-of-|{POOL}-(?:dl|poison)$)"
"""What such a policy removes from these two queues while no daemon leads nobody can keep; `osrdyne doctor` names it."""
PATIENCE = 120.0
T = TypeVar("T")


async def insist(action: Callable[[ManagementClient], Awaitable[T]], node: Node) -> T:
    found: list[T] = []

    async def succeeds() -> bool:
        with suppress(BrokerError):
            async with managing(node) as management:
                found.append(await action(management))
        return bool(found)

    await until(succeeds, "RabbitMQ takes the change", timeout=PATIENCE)
    return found[0]


# --- messages


async def flood(pool: PoolUnderAttack, fault: Fault) -> None:
    """Large messages to one exchange, half of them for a new key; credit is for one of the workers."""
    exchange = getattr(NAMES, f"{fault.target}_exchange")
    properties = HEADERS_FLAG + LARGE_TABLES[fault.action]
    keys = [f"hostile={fault.at}", drawn(fault, KEYS)]
    if fault.target is Target.CREDIT:
        keys = [worker.worker_id for worker in pool.daemons[0].workers()] or keys
    with suppress(OSError, EOFError):  # RabbitMQ is down
        async with raw_publisher(pool.broker.amqp_uri) as raw:
            for number in range(BURST):
                key = keys[number % len(keys)].encode()
                await raw.publish(HostileMessage(number, key, properties, b""), exchange=exchange)


# --- policies and permissions


@asynccontextmanager
async def different_policies(node: Node, action: Action) -> AsyncIterator[None]:
    if action is Action.DELETE:
        await insist(_delete_policies, node)
        yield
        return
    kind, pattern = ("policies", FOREIGN_PATTERN)
    if action is Action.OPERATOR:
        kind, pattern = ("operator-policies", OPERATOR_PATTERN)
    body = {"pattern": pattern, "definition": {"message-ttl": TTL_MS}, "apply-to": "queues", "priority": 0}
    await insist(lambda one: one._request("PUT", kind, one.vhost, TTL_POLICY, body=body), node)
    try:
        yield
    finally:
        await insist(lambda one: one._find(kind, one.vhost, TTL_POLICY, method="DELETE"), node)


async def _delete_policies(management: ManagementClient) -> None:
    for policy in await management.list_policies():
        if policy.name.startswith(f"{POOL}-"):
            await management.delete_policy(policy.name)


@asynccontextmanager
async def forbidden(node: Node, user: str) -> AsyncIterator[None]:
    """The user may not publish to the default exchange in the block."""
    await insist(lambda one: one.put_permissions(user, replace(ALL, write="^(?!amq.default).*")), node)
    try:
        yield
    finally:
        await insist(lambda one: one.put_permissions(user, ALL), node)


# --- imports


async def queues_of_key(node: Node, key: Key) -> Sequence[str]:
    possible = {NAMES.request_queue(key, priority) for priority in (None, *range(10))}
    with suppress(BrokerError):
        async with managing(node) as management:
            return [
                one.name for one in await management.list_queues(NAMES.request_queue_prefix) if one.name in possible
            ]
    return ()


async def import_again(node: Node, queue: str) -> None:
    """Delete the queue, and declare it again with its arguments and bindings, as an import of definitions does."""
    sources = [NAMES.requests_exchange, NAMES.work_exchange(priority_of(queue))]
    if not queue.startswith(NAMES.request_queue_prefix):
        sources = [f"{queue}-xchg"]

    async def look(management: ManagementClient) -> tuple[Mapping[str, object] | None, list[ListedBinding]]:
        arguments = await management.get_queue_arguments(queue)
        bindings = [one for source in sources for one in await management.list_source_bindings(source)]
        return arguments, [one for one in bindings if one.destination == queue]

    async def change(_: ManagementClient) -> None:
        async with connected(node.amqp_uri) as connection:
            channel = await connection.channel()
            await channel.begin_delete_queue(queue)
            await channel.declare_queue(queue, arguments=arguments)
            for one in bindings:
                await channel.bind_queue(queue, one.source, one.routing_key, arguments=one.arguments)

    arguments, bindings = await insist(look, node)
    if arguments is not None:  # else its group has ended meanwhile
        await insist(change, node)

"""Declares a pool's topology and puts its policies. Called by the leader at takeover; repeating it is harmless."""

from __future__ import annotations

from typing import assert_never

from osrdyne.amqp import Channel
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.topology.declarations import Declaration, Exchange, ExchangeBinding, Queue, QueueBinding, Topology
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.errors import BrokerConflictError


async def declare_topology(channel: Channel, topology: Topology) -> None:
    """Declare everything in order.

    Raises `BrokerConflictError` if an object of the same name exists with other arguments. That object stays as it is,
    and the channel is closed.
    """
    for item in topology.declarations:
        await _declare(channel, item)


async def _declare(channel: Channel, item: Declaration) -> None:
    match item:
        case Exchange(name, kind, arguments):
            try:
                await channel.declare_exchange(name, kind, arguments=arguments)
            except BrokerConflictError as error:
                raise _conflict("exchange", name, error) from error
        case Queue(name, arguments):
            try:
                await channel.declare_queue(name, arguments=arguments)
            except BrokerConflictError as error:
                raise _conflict("queue", name, error) from error
        case QueueBinding(queue, exchange, routing_key, arguments):
            await channel.bind_queue(queue, exchange, routing_key, arguments=arguments)
        case ExchangeBinding(destination, source, arguments):
            await channel.bind_exchange(destination, source, arguments=arguments)
        case _:
            assert_never(item)


def _conflict(kind: str, name: str, error: BrokerConflictError) -> BrokerConflictError:
    """Add the remedy to the error, with the argument and both values of RabbitMQ's text if it has them."""
    difference = error.message.partition("PRECONDITION_FAILED - ")[2] or error.message
    remedy = "drain and delete it" if kind == "queue" else "delete it"
    return BrokerConflictError(
        f"The {kind} {name} exists with other arguments ({difference}): {remedy}, or use another pool.id.",
        **{kind: name},
    )


async def apply_policies(management: ManagementClient, *policies: PolicySpec) -> list[PolicySpec]:
    """Put policies that are missing or different; return these."""
    changed = []
    for policy in policies:
        # Only if it differs: RabbitMQ applies a policy that is put again to all of its queues.
        if await management.get_policy(policy.name) != policy:
            await management.put_policy(policy)
            changed.append(policy)
    return changed

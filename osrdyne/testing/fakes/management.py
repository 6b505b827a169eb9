"""The HTTP API of a `FakeBroker`, and global parameters without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from osrdyne.broker.management.client import MAX_PAGE_SIZE, ManagementClient
from osrdyne.broker.management.models import TOTALS_MAX_AGE, Binding, ListedBinding, ListedExchange, QueueTotals
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.errors import ManagementUnavailableError
from osrdyne.protocol.names import QueueName
from osrdyne.testing.fakes.broker import FakeBroker


class FakeManagement(ManagementClient):
    """Answers from a `FakeBroker`, with totals that are `broker.totals_age` seconds old."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.available = True
        """False: every call fails, as with a disabled management plugin."""

    def __repr__(self) -> str:
        return "FakeManagement()"

    async def close(self) -> None:
        """Nothing to close."""

    async def list_queues(self, prefix: str, *, page_size: int = MAX_PAGE_SIZE) -> list[QueueTotals]:
        asked_at = self.broker.clock.monotonic()
        await self._ask("list_queues", prefix)
        return [self._totals(name, asked_at) for name in sorted(self.broker.queues) if name.startswith(prefix)]

    def _totals(self, name: str, asked_at: float) -> QueueTotals:
        queue = self.broker.queues[name]
        known = asked_at - self.broker.totals_age
        return QueueTotals(
            name=QueueName(name),
            arguments=queue.arguments,
            messages=queue.total_at(known) if queue.running else 0,
            ready=len(queue.ready) if queue.running else 0,
            unacknowledged=None,
            state="running" if queue.running or queue.is_leaderless else "down",
            type=str(queue.arguments.get("x-queue-type", "classic")),
            policy=None,
            sampled_after=asked_at - TOTALS_MAX_AGE,
            members_online=queue.running or queue.is_leaderless,
        )

    async def list_bindings(self, exchange: str) -> list[Binding]:
        await self._ask("list_bindings", exchange)
        found = self.broker.exchanges.get(exchange)
        return [Binding(QueueName(queue), key) for queue, key in sorted(found.bindings)] if found else []

    async def has_binding(self, exchange: str, queue: str, routing_key: str) -> bool:
        await self._ask("has_binding", queue)
        found = self.broker.exchanges.get(exchange)
        return found is not None and (queue, routing_key) in found.bindings

    async def get_queue_arguments(self, name: str) -> Mapping[str, object] | None:
        await self._ask("get_queue_arguments", name)
        queue = self.broker.queues.get(name)
        return None if queue is None else queue.arguments

    async def count_consuming_connections(self, queue: str) -> int | None:
        await self._ask("count_consuming_connections", queue)
        found = self.broker.queues.get(queue)
        return 0 if found is None else len({id(one.connection) for one in found.holders if one.active})

    async def find_exchanges(self, prefix: str) -> list[ListedExchange]:
        await self._ask("find_exchanges", prefix)
        return [
            ListedExchange(name, one.kind, True, False, one.arguments)
            for name, one in sorted(self.broker.exchanges.items())
            if name.startswith(prefix)
        ]

    async def list_source_bindings(self, exchange: str) -> list[ListedBinding]:
        await self._ask("list_source_bindings", exchange)
        found = self.broker.exchanges.get(exchange)
        if found is None:
            return []
        by_key = [ListedBinding(exchange, queue, False, key) for queue, key in sorted(found.bindings)]
        return by_key + [
            ListedBinding(exchange, name, name in self.broker.exchanges, "", {"x-match": "all-with-x", **wanted})
            for name, wanted in found.by_headers
        ]

    async def list_policies(self) -> list[PolicySpec]:
        await self._ask("list_policies", "")
        return list(self.broker.policies.values())

    async def list_operator_policies(self) -> list[PolicySpec]:
        await self._ask("list_operator_policies", "")
        return list(self.broker.operator_policies)

    async def get_policy(self, name: str) -> PolicySpec | None:
        await self._ask("get_policy", name)
        return self.broker.policies.get(name)

    async def put_policy(self, policy: PolicySpec) -> None:
        await self._ask("put_policy", policy.name)
        self.broker.policies[policy.name] = policy

    async def delete_policy(self, name: str) -> None:
        await self._ask("delete_policy", name)
        self.broker.policies.pop(name, None)

    async def get_global_parameter(self, name: str) -> object | None:
        await self._ask("get_global_parameter", name)
        return self.broker.parameters.get(name)

    async def put_global_parameter(self, name: str, value: object) -> None:
        await self._ask("put_global_parameter", name)
        self.broker.parameters[name] = value

    async def _ask(self, call: str, target: str) -> None:
        await self.broker.pass_hook(call, target, done=False)
        if not self.available:
            raise ManagementUnavailableError("RabbitMQ's HTTP API did not answer in time.")


class Parameters:
    """Global parameters in memory. Implements `pool.state.groups.pins.Parameters`; each call yields to other tasks."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    async def get_global_parameter(self, name: str) -> object | None:
        await asyncio.sleep(0)
        return self.values.get(name)

    async def put_global_parameter(self, name: str, value: object) -> None:
        await asyncio.sleep(0)
        self.values[name] = value

"""A broker in memory, for tests that run the real leader in virtual time.

`FakeBroker` has the state that survives connections: exchanges, bindings, policies and queues. `fakes.amqp` adds
connections and channels, `fakes.management` the HTTP API. All code above these two runs unchanged: token, probes,
commands on request queues, loops and processors.

Modelled, as in docs/design/broker.md: direct, fanout, topic (equal keys only) and headers exchanges with alternate
exchanges; ordered quorum queues, with prefetch, priorities of consumers, unacknowledged messages that return to their
place, single active consumers, delivery limits and dead letters; channels with unacknowledged messages that count as
consumers after a cancel; publishes that are routed at once, reach their queue `transit` seconds later, and are
confirmed even if the queue is gone by then; totals that are `totals_age` seconds old. Length limits drop the oldest
ready message. Not modelled: time-to-live (call `expire`), alarms, clusters.
"""

from __future__ import annotations

import asyncio
import re
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Message, QueueInfo
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.errors import BrokerConflictError, BrokerNotFoundError
from osrdyne.protocol.statuses import Status

_HISTORY = 60.0
NOTHING: Mapping[str, object] = MappingProxyType({})


class Command(NamedTuple):
    """A command of a client: `declare`, `look_up`, `bind`, `unbind`, `delete`, `consume`, `cancel`, `get`, `ack`,
    `nack`, `publish`, `list_queues`, … on `target` (a queue, an exchange). `done`: it has taken effect, and the answer
    is in transit."""

    name: str
    target: str
    done: bool


Hook = Callable[[Command], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Stored:
    """A message in a queue. `position`: in the order of the queue; `returns`: how often it was returned."""

    position: int
    message: Message
    exchange: str
    routing_key: str
    returns: int = 0


@dataclass(slots=True, eq=False)
class Holder:
    """A consumer as its queue sees it."""

    deliver: Callable[[Stored], None]
    on_delete: Callable[[], None]
    connection: object = None
    prefetch: int = 0
    priority: int = 0
    held: dict[int, Stored] = field(default_factory=dict)
    active: bool = True

    @property
    def has_room(self) -> bool:
        return self.active and (self.prefetch == 0 or len(self.held) < self.prefetch)


class FakeQueue:
    """A quorum queue."""

    def __init__(self, name: str, arguments: Mapping[str, object], clock: Clock) -> None:
        self.name = name
        self.arguments = dict(arguments)
        self.ready: list[Stored] = []
        self.holders: list[Holder] = []
        self.retained: list[tuple[Stored, Status]] = []
        """Dead letters that wait for their confirm: only the total of a listing includes them (broker:
        prove-before-delete)."""
        self.running = True
        """False: its Raft leader does not answer. Counts are zero then, and nothing is delivered."""
        self.is_leaderless = False
        """True: it never had a leader, although its nodes are up; listings call it running (broker:
        prove-before-delete)."""
        self._clock = clock
        self._next_position = 0
        self._totals: deque[tuple[float, int]] = deque([(clock.monotonic(), 0)])

    @property
    def info(self) -> QueueInfo:
        """The answer to a passive declare. A holder of a message counts as a consumer, also after a cancel (broker:
        prove-before-delete)."""
        consumers = sum(holder.active or bool(holder.held) for holder in self.holders)
        return QueueInfo(ready=len(self.ready), consumers=consumers) if self.running else QueueInfo(0, 0)

    @property
    def messages(self) -> int:
        return len(self.ready) + sum(len(holder.held) for holder in self.holders) + len(self.retained)

    def bodies(self) -> list[bytes]:
        """The bodies of all messages, ready or unacknowledged, in the order of the queue."""
        stored = [*self.ready, *(held for holder in self.holders for held in holder.held.values())]
        return [item.message.body for item in sorted(stored, key=attrgetter("position"))]

    def total_at(self, moment: float) -> int:
        """The number of messages at this time."""
        return next((count for at, count in reversed(self._totals) if at <= moment), 0)

    def put(self, message: Message, *, exchange: str, routing_key: str) -> None:
        self._next_position += 1
        self.ready.append(Stored(self._next_position, message, exchange, routing_key))
        longest = self.arguments.get("x-max-length")
        if isinstance(longest, int) and self.messages > longest and self.arguments.get("x-overflow") == "drop-head":
            del self.ready[0]
        self.changed()

    def put_back(self, stored: Stored) -> None:
        """Return a message to its former position."""
        insort(self.ready, stored, key=attrgetter("position"))

    def changed(self) -> None:
        """Deliver the messages that can be delivered, and record the new total."""
        while self.running and self.ready and (holder := self._next_holder()) is not None:
            holder.deliver(self.ready.pop(0))
            self.holders.remove(holder)  # round robin; a single active consumer stays the first
            self.holders.insert(0 if self.is_single else len(self.holders), holder)
        self.holders = [holder for holder in self.holders if holder.active or holder.held]
        now = self._clock.monotonic()
        self._totals.append((now, self.messages))
        while len(self._totals) > 1 and self._totals[1][0] < now - _HISTORY:
            self._totals.popleft()

    @property
    def is_single(self) -> bool:
        return self.arguments.get("x-single-active-consumer") is True

    def _next_holder(self) -> Holder | None:
        active = sorted((one for one in self.holders if one.active), key=lambda one: -one.priority)
        return next((holder for holder in (active[:1] if self.is_single else active) if holder.has_room), None)


@dataclass(slots=True)
class FakeExchange:
    """An exchange with its bindings: (queue, routing key), and those by headers: (queue or exchange, headers)."""

    kind: str
    arguments: Mapping[str, object]
    bindings: set[tuple[str, str]] = field(default_factory=set)
    by_headers: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)

    def route(self, routing_key: str, headers: Mapping[str, object]) -> list[str]:
        """The queues and exchanges to which a message is routed."""
        if self.kind == "headers":
            return sorted({name for name, wanted in self.by_headers if wanted.items() <= headers.items()})
        return sorted({queue for queue, key in self.bindings if self.kind == "fanout" or key == routing_key})


class FakeBroker:
    """The state that survives connections. `transit`: seconds between routing and arrival of a message in a queue."""

    def __init__(self, clock: Clock, *, transit: float = 0.0, totals_age: float = 0.0) -> None:
        self.clock = clock
        self.transit = transit
        self.totals_age = totals_age
        self.version = "4.3.0"
        """Before 4.3, a nack counts as a failed delivery."""
        self.queues: dict[str, FakeQueue] = {}
        self.exchanges: dict[str, FakeExchange] = {"": FakeExchange("direct", {})}
        self.policies: dict[str, PolicySpec] = {}
        self.operator_policies: list[PolicySpec] = []
        self.parameters: dict[str, object] = {}
        self.retains_dead_letters = False
        """True: dead letters stay in their queues until `release_dead_letters`."""
        self.commands: list[Command] = []
        """The commands that have taken effect, in order."""
        self.hook: Hook | None = None
        """Called before and after each command takes effect; it may wait, raise, or cut connections."""

    async def pass_hook(self, name: str, target: str, *, done: bool) -> None:
        command = Command(name, target, done)
        if done:
            self.commands.append(command)
        await asyncio.sleep(0)  # other tasks run, as during a real command
        if self.hook is not None:
            await self.hook(command)

    def count(self, name: str, target: str | None = None) -> int:
        """The number of commands of this kind that have taken effect."""
        return sum(command.name == name and target in (None, command.target) for command in self.commands)

    # --- commands of clients

    def declare_queue(self, name: str, arguments: Mapping[str, object]) -> FakeQueue:
        queue = self.queues.setdefault(name, FakeQueue(name, arguments, self.clock))
        if _declared(queue.arguments) != _declared(arguments):
            raise BrokerConflictError(f"PRECONDITION_FAILED - inequivalent arg for queue {name}")
        return queue

    def look_up(self, name: str) -> FakeQueue:
        if name not in self.queues:
            raise BrokerNotFoundError(f"NOT_FOUND - no queue {name}")
        return self.queues[name]

    def declare_exchange(self, name: str, kind: str, arguments: Mapping[str, object]) -> None:
        exchange = self.exchanges.setdefault(name, FakeExchange(kind, dict(arguments)))
        if (exchange.kind, exchange.arguments) != (kind, dict(arguments)):
            raise BrokerConflictError(f"PRECONDITION_FAILED - inequivalent arg for exchange {name}")

    def exchange(self, name: str) -> FakeExchange:
        if name not in self.exchanges:
            raise BrokerNotFoundError(f"NOT_FOUND - no exchange {name}")
        return self.exchanges[name]

    def bind(self, queue: str, exchange: str, routing_key: str, arguments: Mapping[str, object] = NOTHING) -> None:
        self.look_up(queue)
        found = self.exchange(exchange)
        if found.kind == "headers":
            self._bind_by_headers(queue, found, arguments)
        else:
            found.bindings.add((queue, routing_key))

    def bind_exchange(self, destination: str, source: str, arguments: Mapping[str, object]) -> None:
        """Bind an exchange to a headers exchange."""
        self.exchange(destination)
        self._bind_by_headers(destination, self.exchange(source), arguments)

    def _bind_by_headers(self, destination: str, source: FakeExchange, arguments: Mapping[str, object]) -> None:
        binding = (destination, _wanted(arguments))
        if binding not in source.by_headers:
            source.by_headers.append(binding)

    def unbind(self, queue: str, exchange: str, routing_key: str, arguments: Mapping[str, object] = NOTHING) -> None:
        """Remove a binding; no-op if it does not exist."""
        if exchange in self.exchanges:
            found = self.exchanges[exchange]
            found.bindings.discard((queue, routing_key))
            found.by_headers = [binding for binding in found.by_headers if binding != (queue, _wanted(arguments))]

    def delete_queue(self, name: str) -> int:
        """Delete a queue with its messages; returns the number of ready ones."""
        queue = self.queues.pop(name, None)
        if queue is None:
            return 0
        for exchange in self.exchanges.values():
            exchange.bindings = {binding for binding in exchange.bindings if binding[0] != name}
            exchange.by_headers = [binding for binding in exchange.by_headers if binding[0] != name]
        for holder in list(queue.holders):
            holder.on_delete()
        return len(queue.ready)

    async def publish(self, message: Message, *, exchange: str, routing_key: str) -> bool:
        """Route a message; returns whether it was routed to a queue."""
        queues = self.route(exchange, routing_key, message.headers)
        if self.transit > 0:
            await self.clock.sleep(self.transit)
        for name in queues:
            if name in self.queues:
                self.queues[name].put(message, exchange=exchange, routing_key=routing_key)
        return bool(queues)

    def route(self, exchange: str, routing_key: str, headers: Mapping[str, object] = NOTHING) -> list[str]:
        if exchange == "":
            return [routing_key] if routing_key in self.queues else []
        found = self.exchange(exchange)
        alternate = found.arguments.get("alternate-exchange")
        queues: list[str] = []
        for name in found.route(routing_key, headers):
            queues += [name] if name in self.queues else self.route(name, routing_key, headers)
        if not queues and isinstance(alternate, str):
            return self.route(alternate, routing_key, headers)
        return queues

    def give_back(self, queue: FakeQueue, stored: Stored, *, counted: bool = True) -> None:
        """Return a delivery; beyond the delivery limit it becomes a dead letter. The caller then calls
        `queue.changed`."""
        stored.returns += counted
        limit = self._setting(queue, "delivery-limit")
        if isinstance(limit, int) and stored.returns > limit:
            self.die(queue, stored, Status.DELIVERY_LIMIT)
        else:
            queue.put_back(stored)

    def die(self, queue: FakeQueue, stored: Stored, reason: Status) -> None:
        """Dead-letter a message that was taken out of its queue."""
        exchange = self._setting(queue, "dead-letter-exchange")
        if not isinstance(exchange, str):
            return
        if self.retains_dead_letters:
            queue.retained.append((stored, reason))
            return
        first = {"x-first-death-reason": str(reason), "x-first-death-queue": queue.name}
        headers = {**first, **stored.message.headers, "x-delivery-count": stored.returns}
        earlier = headers.get("x-death")
        death: dict[str, object] = {
            "queue": queue.name,
            "reason": str(reason),
            "time": datetime.fromtimestamp(self.clock.time(), UTC),
        }
        if stored.message.expiration is not None:
            death["original-expiration"] = stored.message.expiration
        headers["x-death"] = [death, *(earlier if isinstance(earlier, list) else ())]
        dead = replace(stored.message, headers=headers, expiration=None)
        for name in self.route(exchange, stored.routing_key, headers):
            self.queues[name].put(dead, exchange=exchange, routing_key=stored.routing_key)

    # --- for tests

    def expire(self, queue_name: str) -> None:
        """Let all ready messages of a queue expire."""
        queue = self.queues[queue_name]
        expired, queue.ready = queue.ready, []
        for stored in expired:
            self.die(queue, stored, Status.EXPIRED)
        queue.changed()

    def release_dead_letters(self) -> None:
        """Route dead letters again, the retained ones first."""
        self.retains_dead_letters = False
        for queue in self.queues.values():
            retained, queue.retained = queue.retained, []
            for stored, reason in retained:
                self.die(queue, stored, reason)
            queue.changed()

    def set_running(self, queue_name: str, running: bool) -> None:
        """Stop the Raft leader of a queue, or start it again."""
        queue = self.queues[queue_name]
        queue.running = running
        queue.changed()

    def bodies(self, queue_name: str) -> list[bytes]:
        """The bodies of all messages of a queue, in order; empty if the queue does not exist."""
        return self.queues[queue_name].bodies() if queue_name in self.queues else []

    # --- internals

    def _setting(self, queue: FakeQueue, name: str) -> object | None:
        """The value of an argument or of the policy with the highest priority; of two numbers the lower one."""
        policies = [policy for policy in self.policies.values() if re.search(policy.pattern, queue.name)]
        policy = max(policies, key=attrgetter("priority"), default=None)
        argument, value = queue.arguments.get(f"x-{name}"), None if policy is None else policy.definition.get(name)
        if isinstance(argument, int) and isinstance(value, int):
            return min(argument, value)
        return value if argument is None else argument


def _wanted(arguments: Mapping[str, object]) -> Mapping[str, object]:
    """The headers that a binding matches; those that begin with `x-` count only with `all-with-x`."""
    with_x = arguments.get("x-match") == "all-with-x"
    return {name: value for name, value in arguments.items() if name != "x-match" and (with_x or name[:2] != "x-")}


def _declared(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that RabbitMQ compares: not those that it does not know (broker: key-argument)."""
    return {name: value for name, value in arguments.items() if not name.startswith("x-osrdyne-")}

"""The cancel processor: sends a client's cancel of a request to the workers of its group.

A client may cancel a request whose correlation id and reply address it knows (docs/reference/protocol/requests.md). A
lost cancel costs only the work that it would have saved. A request may also be in no worker, because it waits for
another attempt. Therefore the leader keeps cancels for as long as such a wait may last: a worker of the group that
reports later receives the cancel, and the ingress answers the request if it returns there. A request that waits for
room in a full queue is answered at once (waiting.py). Cancels end with the leader's term.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Delivery, Message
from osrdyne.amqp.consumer import Consumer
from osrdyne.errors import BrokerSilentError, InvalidKeyError, PublishRefusedError
from osrdyne.ingress.checks import Refusal
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.routing.active_manifest import ActiveSplitter
from osrdyne.pool.routing.routes import ActiveRoutes
from osrdyne.pool.state.groups.tracker import PoolStateTracker
from osrdyne.processors.consumers import ErrorBoundary
from osrdyne.processors.forgeries import Forgeries
from osrdyne.protocol.control import Command, ControlMessage
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, WorkerId, may_be_addressed, parse_key
from osrdyne.protocol.statuses import Status

PREFETCH = 100
MAX_KEPT = 1000  # Kept cancels; beyond it the oldest is dropped.

CANCELLED = Refusal(Status.CANCELLED, "The client cancelled the request.")


class RequestName(NamedTuple):
    """What a client must know to cancel a request (docs/reference/protocol/requests.md)."""

    correlation_id: str
    reply_to: str


@dataclass(slots=True)
class _Kept:
    key: Key
    until: float
    sent_to: set[WorkerId] = field(default_factory=set)


class KeptCancels:
    """The cancels of one leader's term. `key` is the one in the cancel message."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[RequestName, _Kept] = OrderedDict()

    def keep(self, name: RequestName, key: Key, *, seconds: float) -> None:
        """Keep a cancel for as long as the request may wait."""
        if seconds <= 0:
            return
        self._kept[name] = _Kept(key, self._clock.monotonic() + seconds)
        # A repeated cancel counts as new. The oldest one is dropped: its request has most likely ended.
        self._kept.move_to_end(name)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def forget(self, request: Request) -> None:
        """Drop the cancel of a new request's name: it was meant for an earlier request."""
        if self._kept and (name := name_of(request)) is not None:
            self._kept.pop(name, None)

    def was_cancelled(self, request: Request) -> bool:
        """Whether a request that was accepted before has been cancelled since."""
        kept = self._kept.get(name) if (name := name_of(request)) is not None else None
        return kept is not None and self._clock.monotonic() <= kept.until

    def unsent(self, worker: WorkerId, concerns: Callable[[Key], bool]) -> list[tuple[RequestName, float]]:
        """The cancels that a worker has not received, each with the seconds that it is still kept."""
        now = self._clock.monotonic()
        for name in [name for name, one in self._kept.items() if one.until < now]:
            # Removed here and not by a timer: cancels are read only when a worker reports or a request returns.
            del self._kept[name]
        return [
            (name, one.until - now)
            for name, one in self._kept.items()
            if worker not in one.sent_to and concerns(one.key)
        ]

    def note_sent(self, name: RequestName, worker: WorkerId) -> None:
        """Note that the worker has received the cancel."""
        if name in self._kept:
            self._kept[name].sent_to.add(worker)


def name_of(request: Request) -> RequestName | None:
    """The name of a request; None if its client cannot cancel it."""
    if not request.correlation_id or not request.reply_to:
        return None
    return RequestName(request.correlation_id, request.reply_to)


class GroupsOfKeys:
    """The groups that requests with the key of a client may be in."""

    def __init__(self, tracker: PoolStateTracker, routes: ActiveRoutes, splitter: ActiveSplitter) -> None:
        self._tracker = tracker
        self._routes = routes
        self._splitter = splitter

    def all(self, key: Key) -> set[Key]:
        """The group of the key, those that the splitter makes of it, and those that a route names for any key."""
        return {key, *self._split(key), *self._named()}

    def likely(self, key: Key) -> set[Key]:
        """As `all`, but without those that a route names while one of the others is up or being started."""
        own = {one for one in {key, *self._split(key)} if self._tracker.status(one) is not None}
        return own or set(self._named())

    def _split(self, key: Key) -> list[Key]:
        splitter = self._splitter.splitter
        prefix = None if splitter is None else splitter.prefix_of(key)
        known = [] if prefix is None else self._tracker.keys()
        return [one for one in known if prefix is not None and one.startswith(prefix)]

    def _named(self) -> Collection[Key]:
        table = self._routes.table
        return () if table is None else table.manifest.named_keys


class CancelProcessor:
    """Consumes `P-cancel`."""

    def __init__(
        self,
        context: TermContext,
        *,
        tracker: PoolStateTracker,
        routes: ActiveRoutes,
        splitter: ActiveSplitter,
        kept: KeptCancels,
        publisher: Publisher,
        forgeries: Forgeries,
        on_cancel: Callable[[RequestName, Key], None],
    ) -> None:
        """`on_cancel`: gets the name and the key of each cancelled request."""
        self._names, self._metrics = context.names, context.metrics
        self._on_cancel = on_cancel
        self._tracker = tracker
        self._routes = routes
        self._splitter = splitter
        self._groups = GroupsOfKeys(tracker, routes, splitter)
        self._kept = kept
        self._publisher = publisher
        self._forgeries = forgeries
        self._log: Logger = get_logger("cancels", pool=self._names.pool)

    async def run(self, consumer: Consumer) -> None:
        """Process cancels until the consumer ends."""
        async for delivery in consumer:
            with ErrorBoundary(delivery, self._log) as boundary:
                await self.process(delivery)
            if boundary.failed:
                self._count_invalid()
            # Crash before: the next leader sends the cancel again, which changes nothing. A cancel that failed is not
            # tried again, because it may be too late already.
            await delivery.ack()

    def _count_invalid(self) -> None:
        self._metrics.invalid_messages.labels(queue="cancel").inc()

    async def process(self, delivery: Delivery) -> None:
        """Send one cancel to every worker that may run the request; the worker that runs it stops it."""
        if self._forgeries.is_forged(delivery, self._names.cancel_exchange, queue="cancel"):
            return
        properties = delivery.properties
        try:
            key = parse_key(delivery.routing_key)
            # Both are needed: the pair is the right to cancel, and a correlation id alone can be guessed.
            if not properties.correlation_id or not properties.reply_to:
                raise InvalidKeyError("A cancel needs the correlation id and the reply address of its request.")
        except InvalidKeyError as error:
            self._count_invalid()
            self._log.debug("cancel ignored", error=str(error))
            return
        name, keep_for = RequestName(properties.correlation_id, properties.reply_to), self._routes.longest_wait
        # Kept before it is sent: a worker that reports in between gets it by `repeat_to`.
        self._kept.keep(name, key, seconds=keep_for)
        self._on_cancel(name, key)
        message = self._message(name, keep_for=keep_for)
        # To the control routing key of the group, not to one worker: the leader does not know which worker runs it.
        for group in self._groups.all(key):
            await self._send(self._names.control_group_routing_key(group), message)

    async def repeat_to(self, group: Key, worker: WorkerId) -> None:
        """Send a worker that has reported the kept cancels that it has not received."""
        if not may_be_addressed(worker):
            return
        unsent = self._kept.unsent(worker, self._concerning(group))
        await asyncio.gather(*(self._send_to_worker(worker, name, keep_for) for name, keep_for in unsent))

    async def _send_to_worker(self, worker: WorkerId, name: RequestName, keep_for: float) -> None:
        message, routing_key = self._message(name, keep_for=keep_for), self._names.control_worker_routing_key(worker)
        if await self._send(routing_key, message, mandatory=True):
            # Only after the confirm: otherwise the cancel is sent again after the next report of the worker.
            self._kept.note_sent(name, worker)
            self._log.debug("cancel sent to a worker", worker=worker, correlation_id=name.correlation_id)

    def _message(self, name: RequestName, *, keep_for: float) -> ControlMessage:
        kept = {"keep_for": round(keep_for, 3)} if keep_for > 0 else {}
        return ControlMessage(Command.CANCEL, self._tracker.generation, {**name._asdict(), **kept})

    def _concerning(self, group: Key) -> Callable[[Key], bool]:
        """A function that returns whether a request with a key may be in this group."""
        splitter, table = self._splitter.splitter, self._routes.table
        is_named = table is not None and group in table.manifest.named_keys

        def concerns(key: Key) -> bool:
            prefix = None if splitter is None else splitter.prefix_of(key)
            return is_named or group == key or (prefix is not None and group.startswith(prefix))

        return concerns

    async def _send(self, routing_key: str, message: ControlMessage, *, mandatory: bool = False) -> bool:
        """Publish a control message; whether RabbitMQ confirmed it and, if `mandatory`, routed it to a queue."""
        try:
            await self._publisher.publish(
                # Control queues do not outlive their worker: nothing would read the message after a restart of
                # RabbitMQ.
                Message(body=message.wire_body(), persistent=False),
                exchange=self._names.control_exchange,
                routing_key=routing_key,
                mandatory=mandatory,
            )
        except (PublishRefusedError, BrokerSilentError) as error:
            # A mandatory message fails when the worker has no control queue any more, which is no fault.
            if not mandatory:
                self._log.warning("cancel not sent", to=routing_key, error=str(error))
            return False
        return True

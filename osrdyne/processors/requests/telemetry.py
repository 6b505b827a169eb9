"""Writes requests to the log of telemetry: to the stream of the partition of their key, with a publisher confirm.

The forwarder acknowledges a request only after the log has confirmed it and its caller is answered. The steps, and what
a crash between them leaves:

1. Publish. Crash before: no stream has the message, and the request returns to the orphan queue. After: the stream may
   have it, the request returns, and is written a second time, with the same message id and `x-osrdyne-duplicate`.
2. Answer the caller, if it named a reply queue. Crash after: the caller is answered a second time.
3. Acknowledge the request. From then on only the log has it.

A write does not wait for a group, and a group does not wait for a write. Used by the forwarder.
"""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Message
from osrdyne.errors import BrokerAccessError, BrokerSilentError, MessageTooLargeError, PublishRefusedError
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import Refusal
from osrdyne.ingress.telemetry import Log
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.routing.telemetry import ActiveLog
from osrdyne.processors.publish_order import PublishOrder, Ticket
from osrdyne.processors.replies import Replier, SetAside
from osrdyne.processors.requests.forwarding import PUBLISH_RETRY, UNCONFIRMED_RETRY, Orphan, seconds_left
from osrdyne.protocol.messages import DUPLICATE_HEADER, PRINCIPAL_HEADER, ROUTE_HEADER, without_identity
from osrdyne.protocol.names import Key
from osrdyne.protocol.retries import OWN_HEADERS
from osrdyne.protocol.statuses import Status
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER

OUTCOME = "logged"
OWN_PREFIX = "x-osrdyne-"
OFFSET_HEADER = "x-stream-offset"
NOT_LOGGED = Refusal(Status.EXPIRED, "The message expired before the log confirmed it.")


def log_message(orphan: Orphan, routed: RoutedRequest, *, maybe_delivered: bool) -> Message:
    """The message as it is stored in the log: body and properties of the client, and our own headers; without a reply
    address, and without a time-to-live, which would end it before the retention does."""
    own = {
        KEY_HEADER: routed.key,
        ENQUEUED_HEADER: orphan.arrival.accepted_ms,
        ROUTE_HEADER: routed.route,
        PRINCIPAL_HEADER: orphan.arrival.principal,
        # From the first publish without a confirm on, the stream may have a copy already.
        DUPLICATE_HEADER: True if maybe_delivered else None,
    }
    headers = {
        name: value
        for name, value in without_identity(orphan.delivery.headers).items()
        # A client must not set ours, nor the offset, which RabbitMQ sets for readers.
        if not name.startswith(OWN_PREFIX) and name not in OWN_HEADERS and name != OFFSET_HEADER
    }
    headers |= {name: value for name, value in own.items() if value is not None}
    return replace(orphan.delivery.to_message(headers=headers, expiration=None), reply_to=None)


class LogWriter:
    """Writes to the log of one pool, for one term."""

    def __init__(self, context: TermContext, *, log: ActiveLog, publisher: Publisher, replier: Replier) -> None:
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._active = log
        self._publisher = publisher
        self._replier = replier
        # Not the order of the request queues: a stream must not hold back the queue of a group whose key has its name.
        self._order = PublishOrder()
        self._failing: set[int] = set()  # partitions whose latest publish was not confirmed
        self._log: Logger = get_logger("telemetry", pool=context.names.pool)

    @property
    def log(self) -> Log:
        return self._active.log

    def enter(self, routed: RoutedRequest) -> Ticket:
        """A ticket behind all messages of the partition, so that messages of a key keep their order."""
        return self._order.enter(Key(self._names.log_stream(self.log.partition(routed.key))), None)

    async def write(
        self, orphan: Orphan, routed: RoutedRequest, ticket: Ticket, *, set_aside: SetAside
    ) -> Refusal | None:
        """Publish until the stream confirms, and answer the caller; the refusal if no further attempt can succeed. The
        request may be acknowledged when this returns. `set_aside` is called if that takes long."""
        partition = self.log.partition(routed.key)
        with ticket:
            refusal = await self._publish(orphan, routed, partition, ticket, set_aside)
        if refusal is None:
            self._metrics.telemetry_messages.labels(partition=str(partition)).inc()
            self._metrics.telemetry_bytes.inc(len(orphan.request.body))
            if routed.keeps_reply:
                await self._replier.answer(
                    orphan.request,
                    Status.OK,
                    f"The log {routed.log} has the message, in partition {partition}.",
                    code=HTTPStatus.ACCEPTED.value,
                    subject="accepted",
                    facts={"log": routed.log, "partition": partition},
                    set_aside=set_aside,
                )
        elif routed.keeps_reply:
            await self._replier.answer(orphan.request, refusal.status, refusal.detail, set_aside=set_aside)
        return refusal

    async def _publish(
        self,
        orphan: Orphan,
        routed: RoutedRequest,
        partition: int,
        ticket: Ticket,
        set_aside: SetAside,
    ) -> Refusal | None:
        stream = self._names.log_stream(partition)
        if partition in self._failing:
            set_aside()
        maybe_delivered, failures = orphan.delivery.redelivered, 0
        # The first attempt is made in any case, as for a group.
        while not failures or self._seconds_left(routed) > 0:
            if not await self._turn(ticket, routed):
                return NOT_LOGGED
            message = log_message(orphan, routed, maybe_delivered=maybe_delivered)
            try:
                await self._publisher.publish(message, exchange="", routing_key=stream, mandatory=True)
                self._failing.discard(partition)
                return None
            except MessageTooLargeError as error:
                # No further attempt: the same headers are too large each time.
                return Refusal(Status.INVALID, str(error))
            except PublishRefusedError as error:
                # Returned, because the stream is missing: the topology watch declares it again. Or nacked.
                failures += 1
                delay = PUBLISH_RETRY.delay(failures)
                self._log.warning("message not written to the log", stream=stream, error=str(error), retry_in=delay)
            except (BrokerSilentError, BrokerAccessError) as error:
                # A stream without a leader confirms nothing, and the daemon may not publish to the default exchange for
                # a time. Other partitions are not affected.
                maybe_delivered = True
                failures += 1
                delay = UNCONFIRMED_RETRY.delay(failures)
                self._log.warning("log has not confirmed a message", stream=stream, error=str(error), retry_in=delay)
            # Messages behind this one would overtake it. Requests for groups must not wait for them.
            ticket.hold_back()
            self._failing.add(partition)
            set_aside()
            await self._clock.sleep(min(delay, self._seconds_left(routed)))
        return NOT_LOGGED

    async def _turn(self, ticket: Ticket, routed: RoutedRequest) -> bool:
        """Wait behind a message that is written again, at most until the deadline. False if the deadline has passed:
        then the log has no copy."""
        if ticket.may_publish:
            return await ticket.turn()
        timer = self._clock.call_later(self._seconds_left(routed), ticket.cancel)
        try:
            return await ticket.turn()
        finally:
            timer.cancel()

    def _seconds_left(self, routed: RoutedRequest) -> float:
        return seconds_left(routed, now_ms=now_ms(self._clock))

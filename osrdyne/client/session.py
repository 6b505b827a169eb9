"""One connection's worth of requests: a channel that publishes them and receives their answers.

Direct reply-to ties both to one channel, so a session ends with its channel, and its calls with it. `aio` owns the
sessions and opens the next one; nothing here reconnects or repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from osrdyne.amqp import Channel, Connection, ConnectionOptions, Consumer, Delivery, Message, connect
from osrdyne.client.errors import (
    ConnectionLostError,
    InvalidRequestError,
    PoolNotFoundError,
    RequestError,
    RequestQueueFullError,
    RequestRefusedError,
)
from osrdyne.client.progress import StartCallback, StartInquiries
from osrdyne.client.reply import Reply
from osrdyne.client.request import DIRECT_REPLY_TO, OutgoingRequest
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerError,
    BrokerNotFoundError,
    BrokerUnavailableError,
    OsrdyneError,
    PublishRefusedError,
    QueueFullError,
)
from osrdyne.logs import get_logger
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.progress import StartProgress
from osrdyne.protocol.streams import Grant

log = get_logger("client")

_CANCEL_TIMEOUT = 5.0
_LOST = (
    "The connection to RabbitMQ was lost while the request was under way; whether it is processed is unknown. "
    "Repeat it if that does no harm (idempotent=True does so by itself)."
)
_UNCONFIRMED = "RabbitMQ did not confirm the request in time; whether it is processed is unknown."

T = TypeVar("T")

ProgressCallback = Callable[[Reply], None]


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that waits for its last answer.

    `outcome` holds an error as its result, not as its exception: no task may be waiting for it.
    """

    request: OutgoingRequest
    outcome: asyncio.Future[Reply | BaseException]
    on_progress: ProgressCallback | None
    on_starting: StartCallback | None
    cancel_soon: Callable[[OutgoingRequest], None]
    ends: Callable[[Reply], bool] | None = None
    """Whether a terminating reply ends the call; None: each does."""

    def end(self, outcome: Reply | BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def is_ended_by(self, reply: Reply) -> bool:
        """Whether a terminating reply ends the call. If it interrupts a stream, the call ends with that error here."""
        try:
            return self.ends is None or self.ends(reply)
        except RequestError as error:
            self.end(error)
            return False

    def progressed(self, reply: Reply) -> None:
        """Pass on a progress or partial answer."""
        if self.on_progress is not None:
            self._call_back(self.on_progress, reply)

    def starting(self, progress: StartProgress) -> None:
        """Pass on what the leader says about the start of the key."""
        if self.on_starting is not None and not self.outcome.done():
            self._call_back(self.on_starting, progress)

    def _call_back(self, callback: Callable[[T], None], value: T) -> None:
        try:
            callback(value)
        except Exception as error:  # the caller's code: its failure ends this call and no other
            self.cancel_soon(self.request)
            self.end(error)


class Session:
    """See the module. Create it with `open`; `serve` must run until it returns, then the session is over."""

    def __init__(self, names: PoolNames, connection: Connection, channel: Channel, replies: Consumer) -> None:
        self._names = names
        self._connection = connection
        self._channel = channel
        self._replies = replies
        self._pending: dict[str, PendingCall] = {}
        self._known_exchanges: set[str] = set()
        self._looking = asyncio.Lock()
        self._cancels: set[asyncio.Task[None]] = set()
        self._inquiries = StartInquiries(names, connection)
        self._grants: Channel | None = None
        self._granting = asyncio.Lock()
        self.ignored_replies = 0

    @classmethod
    async def open(cls, names: PoolNames, options: ConnectionOptions) -> Self:
        """Connect. Raises what `amqp.connect` raises."""
        connection = await connect(options)
        try:
            # Direct reply-to needs one channel for requests and replies: RabbitMQ ties the address to it.
            channel = await connection.channel(confirms=True)
            replies = await channel.consume(DIRECT_REPLY_TO, no_ack=True)
        except BaseException:
            await connection.close()
            raise
        return cls(names, connection, channel, replies)

    @property
    def is_over(self) -> bool:
        # The channel of a lost connection counts as open until the library has closed the socket.
        return self._channel.is_closed or self._connection.is_closed

    @property
    def is_blocked(self) -> bool:
        return self._connection.is_blocked

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    async def serve(self) -> OsrdyneError:
        """Hand out answers until the channel is gone; then fail the calls under way and return why."""
        try:
            while True:
                self._dispatch(await self._replies.get())
        except BrokerUnavailableError as error:
            return error
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection: calls under way end with `ConnectionLostError`, and are cancelled if possible."""
        for call in self._pending.values():
            self._cancel_soon(call.request)
            call.end(ConnectionLostError(_LOST))
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=_CANCEL_TIMEOUT)
        await self._inquiries.close()
        await self._connection.close()

    async def call(
        self,
        request: OutgoingRequest,
        on_progress: ProgressCallback | None = None,
        on_starting: StartCallback | None = None,
        ends: Callable[[Reply], bool] | None = None,
    ) -> Reply:
        """Publish a request and wait for its last answer. Cancelling the wait cancels the request.

        `ends`: whether a terminating reply ends the call; None: each does.
        """
        outcome_of = asyncio.get_running_loop().create_future()
        call = PendingCall(request, outcome_of, on_progress, on_starting, self._cancel_soon, ends)
        # Registered before the publish: the answer may arrive before the confirm.
        if self._pending.setdefault(request.correlation_id, call) is not call:
            raise InvalidRequestError(
                f"A call with the correlation id {request.correlation_id!r} is under way already."
            )
        try:
            await self.publish(request)
            if on_starting is not None:
                self._inquiries.watch(request.key, call)
            outcome = await call.outcome
        except asyncio.CancelledError:
            self._cancel_soon(request)
            raise
        finally:
            del self._pending[request.correlation_id]
            self._inquiries.forget(request.key, call)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def publish(self, request: OutgoingRequest) -> None:
        """Publish a request; return once RabbitMQ has taken it over."""
        await self._require_exchange(self._names.requests_exchange)
        if self._connection.is_blocked:
            await self._connection.wait_unblocked()
        if self.is_over:
            raise ConnectionLostError(_LOST)
        # Before the publish: from here on RabbitMQ may have the request, and it must not be sent again unasked.
        request.sent = True
        await self._publish(request.message, self._names.requests_exchange, request.key)

    async def cancel(self, correlation_id: str) -> bool:
        """Ask the controller to cancel a call of this session; False when there is no such call."""
        call = self._pending.get(correlation_id)
        if call is not None:
            await self._publish_cancel(call.request)
        return call is not None

    async def grant(self, grant: Grant, worker_id: str) -> None:
        """Grant credit to the worker of a streamed answer. A message that is lost is repeated by the caller.

        Raises `RequestRefusedError` if the user of this connection may not do that.
        """
        exchange = self._names.credit_exchange
        try:
            async with self._granting:
                # On a channel of its own: RabbitMQ closes the channel of a user who may not write to the exchange.
                if self._grants is None or self._grants.is_closed:
                    self._grants = await self._connection.channel()
                message = Message(headers=grant.wire_headers(), persistent=False)
                await self._grants.publish(message, exchange=exchange, routing_key=worker_id)
                # Answered after the message: an error that the publish causes is known by now.
                await self._grants.ping()
        except BrokerAccessError as error:
            raise RequestRefusedError(
                f"The user of this connection may not write to {exchange}, which streamed answers need: see "
                "docs/how-to/create-client-users.md.",
            ) from error
        except BrokerError as error:
            # The connection, and with it the call, may be lost; otherwise the next grant replaces this one.
            log.info("credit not granted", error=str(error))

    def _cancel_soon(self, request: OutgoingRequest) -> None:
        if not request.sent or self.is_over:
            return
        task = asyncio.create_task(self._try_cancel(request), name="osrdyne client cancel")
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _try_cancel(self, request: OutgoingRequest) -> None:
        try:
            async with asyncio.timeout(_CANCEL_TIMEOUT):
                await self._publish_cancel(request)
        except (OsrdyneError, TimeoutError) as error:
            log.info("request not cancelled", correlation_id=request.correlation_id, error=str(error))

    async def _publish_cancel(self, request: OutgoingRequest) -> None:
        """Published on the channel of the request, the broker writes the same concrete address into `reply-to` as
        into the request's: that pair is the right to cancel (docs/reference/protocol/requests.md)."""
        await self._require_exchange(self._names.cancel_exchange)
        message = Message(correlation_id=request.correlation_id, reply_to=DIRECT_REPLY_TO, persistent=False)
        await self._publish(message, self._names.cancel_exchange, request.key)

    async def _publish(self, message: Message, exchange: str, key: Key) -> None:
        try:
            await self._channel.publish(message, exchange=exchange, routing_key=key, mandatory=True)
        except BrokerNotFoundError as error:
            raise self._pool_not_found(exchange) from error
        except QueueFullError as error:
            raise RequestQueueFullError(
                "The request queue is full; RabbitMQ did not accept the request.", key=key
            ) from error
        except PublishRefusedError as error:
            raise RequestRefusedError(
                "RabbitMQ did not accept the request: there is no queue for it.", key=key
            ) from error
        except BrokerConflictError as error:
            raise InvalidRequestError(f"RabbitMQ does not accept the request: {error}.", key=key) from error
        except BrokerUnavailableError as error:
            raise ConnectionLostError(_LOST if self.is_over else _UNCONFIRMED, key=key) from error

    async def _require_exchange(self, exchange: str) -> None:
        """Look once, on a channel of its own: publishing to a missing exchange would end all calls of this session."""
        if exchange in self._known_exchanges:
            return
        async with self._looking:
            if exchange not in self._known_exchanges:
                await self._look_for(exchange)
                self._known_exchanges.add(exchange)

    async def _look_for(self, exchange: str) -> None:
        try:
            probe = await self._connection.channel()
            try:
                await probe.declare_exchange(exchange, "direct", passive=True)
            finally:
                await probe.close()
        except BrokerNotFoundError:
            raise self._pool_not_found(exchange) from None
        except BrokerUnavailableError as error:
            raise ConnectionLostError(_LOST) from error

    def _pool_not_found(self, exchange: str) -> PoolNotFoundError:
        return PoolNotFoundError(
            f"There is no pool {self._names.pool!r} on this broker (no exchange {exchange}): "
            "check broker and pool name, and that its daemon (`osrdyne run`, `osrdyne dev`) has run once.",
            pool=self._names.pool,
        )

    def _dispatch(self, delivery: Delivery) -> None:
        properties = delivery.properties
        call = self._pending.get(properties.correlation_id or "")
        # A repeated answer, after a crash between reply and acknowledgement, or one that came too late.
        if call is None or call.outcome.done():
            self.ignored_replies += 1
            return
        reply = Reply.from_wire(headers=delivery.headers, body=delivery.body, content_type=properties.content_type)
        if reply.progress:
            # A worker runs it.
            self._inquiries.forget(call.request.key, call)
            call.progressed(reply)
        elif call.is_ended_by(reply):
            call.end(reply)

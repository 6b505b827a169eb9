"""One connection of a client, and the channel that publishes its requests and receives their answers.

Direct reply-to binds both to one channel, so a session and its calls end with the channel. `aio` owns the sessions and
opens the next one; a session neither reconnects nor repeats requests.
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
from osrdyne.client.request import OutgoingRequest
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
from osrdyne.protocol.messages import JOB_PROGRESS_HEADER
from osrdyne.protocol.names import DIRECT_REPLY_TO, Key, PoolNames
from osrdyne.protocol.progress import JobProgress, StartProgress
from osrdyne.protocol.streams import Grant

log = get_logger("client")

_CANCEL_TIMEOUT = 5.0
_RETRY_PAUSE = 0.5  # Seconds after a channel could not be opened on a connection that is not lost.
_LOST = (
    "The connection to RabbitMQ was lost before the answer; whether the request is processed is unknown. "
    "If a second run does no harm, send it again; idempotent=True does so automatically."
)
_UNCONFIRMED = "RabbitMQ did not confirm the request in time; whether it is processed is unknown."

T = TypeVar("T")

ProgressCallback = Callable[[Reply], None]
JobsCallback = Callable[[JobProgress], None]


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that waits for its last answer.

    An error is the result of `outcome`, not its exception: if no task awaits it, asyncio would log the exception.
    """

    request: OutgoingRequest
    outcome: asyncio.Future[Reply | BaseException]
    on_progress: ProgressCallback | None
    on_starting: StartCallback | None
    cancel_soon: Callable[[OutgoingRequest], None]
    ends: Callable[[Reply], bool] | None = None
    """Whether a terminating reply ends the call; None: each does."""
    on_jobs: JobsCallback | None = None

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
        """Pass a progress or partial answer to the callback."""
        if reply.headers.get(JOB_PROGRESS_HEADER) is True:
            if self.on_jobs is not None:
                self._call_back(self.on_jobs, JobProgress.from_json(reply.body))
        elif self.on_progress is not None:
            self._call_back(self.on_progress, reply)

    def starting(self, progress: StartProgress) -> None:
        """Pass the progress of the start of the key to the callback."""
        if self.on_starting is not None and not self.outcome.done():
            self._call_back(self.on_starting, progress)

    def _call_back(self, callback: Callable[[T], None], value: T) -> None:
        try:
            callback(value)
        except Exception as error:  # an error in the caller's code ends this call and no other
            self.cancel_soon(self.request)
            self.end(error)


class Session:
    """One session; see the module. Created with `open`; `serve` must run until the session is over."""

    def __init__(self, names: PoolNames, connection: Connection, channel: Channel, replies: Consumer) -> None:
        self._names = names
        self._connection = connection
        self._channel = channel
        self._replies = replies
        self._pending: dict[str, PendingCall] = {}
        self._known_exchanges: set[str] = set()
        self._checking = asyncio.Lock()
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
        """Dispatch answers until the channel is closed; then fail the calls in flight and return the reason."""
        try:
            while True:
                self._dispatch(await self._replies.get())
        except BrokerUnavailableError as error:
            return error
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection: calls in flight end with `ConnectionLostError`, and are cancelled if possible."""
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
        *,
        on_jobs: JobsCallback | None = None,
    ) -> Reply:
        """Publish a request and wait for its last answer. Cancelling the wait cancels the request.

        `ends`: whether a terminating reply ends the call; None: each does.
        """
        outcome_of = asyncio.get_running_loop().create_future()
        call = PendingCall(request, outcome_of, on_progress, on_starting, self._cancel_soon, ends, on_jobs)
        # Registered before the publish: the answer may arrive before the confirm.
        if self._pending.setdefault(request.correlation_id, call) is not call:
            raise InvalidRequestError(
                f"A call with the correlation id {request.correlation_id!r} is already in flight."
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
        """Publish a request; return once RabbitMQ has confirmed it."""
        await self._require_exchange(self._names.requests_exchange)
        if self._connection.is_blocked:
            await self._connection.wait_unblocked()
        if self.is_over:
            raise ConnectionLostError(_LOST)
        # Before the publish: from here on RabbitMQ may have the request, so only the caller may allow a repetition.
        request.sent = True
        await self._publish(request.message, self._names.requests_exchange, request.key)

    async def cancel(self, correlation_id: str) -> bool:
        """Send a cancel message for a call of this session; False if no such call is in flight."""
        call = self._pending.get(correlation_id)
        if call is not None:
            await self._publish_cancel(call.request)
        return call is not None

    async def grant(self, grant: Grant, worker_id: str) -> None:
        """Grant credit to the worker of a streamed answer. The caller repeats it, because a message may be lost.

        Raises `RequestRefusedError` if the user of this connection may not write to the exchange.
        """
        exchange = self._names.credit_exchange
        try:
            async with self._granting:
                # On a channel of its own: RabbitMQ closes the channel of a user who may not write to the exchange.
                if self._grants is None or self._grants.is_closed:
                    self._grants = await self._connection.channel()
                message = Message(headers=grant.wire_headers(), persistent=False)
                await self._grants.publish(message, exchange=exchange, routing_key=worker_id)
                # RabbitMQ answers it after the publish, and closes the channel first if it refuses the publish.
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
        """Publish a cancel message on the channel of the request: RabbitMQ then writes the same address into `reply-to`
        as for the request, and that proves that the sender is its client (docs/reference/protocol/requests.md)."""
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
                "RabbitMQ did not accept the request: no queue is bound for its key.", key=key
            ) from error
        except BrokerConflictError as error:
            raise InvalidRequestError(f"RabbitMQ does not accept the request: {error}.", key=key) from error
        except BrokerUnavailableError as error:
            raise ConnectionLostError(_LOST if self.is_over else _UNCONFIRMED, key=key) from error

    async def _require_exchange(self, exchange: str) -> None:
        """Check once per session that an exchange exists. Raises `PoolNotFoundError`."""
        if exchange in self._known_exchanges:
            return
        async with self._checking:
            if exchange not in self._known_exchanges:
                await self._check_exchange(exchange)
                self._known_exchanges.add(exchange)

    async def _check_exchange(self, exchange: str) -> None:
        # On a channel of its own: RabbitMQ closes a channel that names a missing exchange, and with it all its calls.
        try:
            probe = await self._connection.channel()
            try:
                await probe.declare_exchange(exchange, "direct", passive=True)
            finally:
                await probe.close()
        except BrokerNotFoundError:
            raise self._pool_not_found(exchange) from None
        except BrokerUnavailableError as error:
            if not self.is_over:
                # For example, RabbitMQ allows no further channel. The caller tries again, and would fail at once.
                await asyncio.sleep(_RETRY_PAUSE)
            raise ConnectionLostError(_LOST) from error

    def _pool_not_found(self, exchange: str) -> PoolNotFoundError:
        return PoolNotFoundError(
            f"This broker has no pool {self._names.pool!r} (no exchange {exchange}): "
            "check broker and pool name, and that its daemon (`osrdyne run`, `osrdyne dev`) has run once.",
            pool=self._names.pool,
        )

    def _dispatch(self, delivery: Delivery) -> None:
        properties = delivery.properties
        call = self._pending.get(properties.correlation_id or "")
        # An answer is repeated after a crash of the worker between reply and acknowledgement, or comes too late.
        if call is None or call.outcome.done():
            self.ignored_replies += 1
            return
        reply = Reply.from_wire(headers=delivery.headers, body=delivery.body, content_type=properties.content_type)
        if reply.progress:
            # A worker runs the request, so its start is over.
            self._inquiries.forget(call.request.key, call)
            call.progressed(reply)
        elif call.is_ended_by(reply):
            call.end(reply)

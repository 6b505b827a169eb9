"""The client for asyncio: many calls in flight on one connection, which it opens again when it is lost.

Used by programs, by `blocking` and by the command line. `call` starts no task. A request that may have reached RabbitMQ
is only repeated if the caller allows it (`idempotent=True`).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from osrdyne.aio.clock import Backoff, Clock, SystemClock
from osrdyne.aio.signals import WatchCell
from osrdyne.amqp import ALARM, ConnectionOptions
from osrdyne.client.errors import (
    ClientClosedError,
    ConnectionLostError,
    RequestTimeoutError,
    StreamInterruptedError,
    error_from_reply,
)
from osrdyne.client.progress import StartCallback
from osrdyne.client.reply import Reply
from osrdyne.client.request import (
    CallTimes,
    OutgoingRequest,
    RequestOptions,
    Sender,
    WantedAnswer,
    build_request,
)
from osrdyne.client.session import JobsCallback, ProgressCallback, Session
from osrdyne.client.streams import BatchDecoder, PartQueue, require_arrow
from osrdyne.errors import BrokerUnavailableError, ConfigurationError, OsrdyneError
from osrdyne.logs import get_logger
from osrdyne.protocol.messages import ARROW_TYPE
from osrdyne.protocol.names import DIRECT_REPLY_TO, PoolNames, is_pool_id
from osrdyne.protocol.streams import DEFAULT_CREDIT, GRANT_INTERVAL, MAX_CREDIT

log = get_logger("client")

_BLOCKED = f"RabbitMQ accepts no messages at present, because of {ALARM}"

T = TypeVar("T")

DEFAULT_TIMEOUT = 600.0
"""Seconds: how long a pool lets a request wait by default, which is enough for a cold start of its worker."""
ANSWER_MARGIN = 3.0
"""Seconds that an `expired` answer may take once the pool counts the request as expired. RabbitMQ's own clock for a
message runs up to a second longer, because `timestamp` has whole seconds."""
ANSWER_SLACK = 5.0 + ANSWER_MARGIN
"""Seconds a call waits beyond its deadline for the answer `expired`, which says more than a time-out. The answer
may come `requests.max_clock_skew` after the deadline, 5 s by default (docs/reference/python-client.md)."""


class ConnectionStatus(StrEnum):
    CONNECTED = "connected"
    BLOCKED = "blocked"
    """RabbitMQ has a memory or disk alarm and accepts no messages: requests wait in this process."""
    RECONNECTING = "reconnecting"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class _Down:
    """The client has no session. `error`: what calls raise because no other session will follow; None: one will."""

    reason: str
    error: OsrdyneError | None = None


class AsyncClient:
    """Sends requests to one pool. Use it as `async with AsyncClient(uri, pool) as client:`, from one event loop.

    Entering connects, and raises `BrokerUnavailableError`, `BrokerAccessError` or `ConfigurationError` when that
    fails. A connection that is lost later is opened again, with the pauses of `reconnect` (None: never). A call whose
    request was sent waits `answer_slack` seconds longer than its `timeout` for the answer `expired`.

    `user_id` is sent as the AMQP property of that name, for pools whose routes match it. It must be the user of the
    connection: RabbitMQ closes the channel otherwise.

    `token` is an API token or a JWT, for managed pools whose policies demand one; or a function that returns it, which
    is called for each request and must not block. Do not give one to a direct pool, where workers could read it.
    """

    def __init__(
        self,
        uri: str,
        pool: str = "osrdyne",
        *,
        name: str = "osrdyne-client",
        user_id: str | None = None,
        token: str | Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        default_timeout: float = DEFAULT_TIMEOUT,
        answer_slack: float = ANSWER_SLACK,
        reconnect: Backoff | None = Backoff(),  # noqa: B008 — a frozen value
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(uri, str):
            raise TypeError(f"the URI must be text such as amqp://user:password@host:5672/, not {type(uri).__name__}")
        if not isinstance(pool, str) or not is_pool_id(pool):
            raise ConfigurationError(f"{pool!r} is not a valid pool id: use 1 to 32 characters out of a-z, 0-9 and _.")
        self._names = PoolNames(pool)
        self._options = ConnectionOptions(uri, name=name, tls=tls)
        self._user_id = user_id
        self._token = token
        self._default_timeout = default_timeout
        self._answer_slack = answer_slack
        self._reconnect = reconnect
        self._clock = clock or SystemClock()
        self._id_prefix = secrets.token_hex(10)
        self._id_counter = itertools.count(1)
        self._state: WatchCell[Session | _Down] = WatchCell(_down_for_good("The client was never opened."))
        self._keeper: asyncio.Task[None] | None = None
        self._ignored_replies = 0

    async def __aenter__(self) -> Self:
        session = await Session.open(self._names, self._options)
        self._state.set(session)
        self._keeper = asyncio.create_task(self._keep_connected(session), name="osrdyne client connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight end with `ConnectionLostError`. Closing again does nothing."""
        state = self._state.value
        # First, so that calls that wait for a session end with this reason and no new call begins.
        self._state.set(_down_for_good("The client is closed."))
        if self._keeper is not None:
            self._keeper.cancel()
            # Not `await self._keeper` with CancelledError suppressed: that would hide a cancellation of this task.
            await asyncio.wait({self._keeper})
            self._keeper = None
        if isinstance(state, Session):
            await state.close()  # usually a no-op; a keeper that is cancelled before its first step closes nothing
            self._ignored_replies += state.ignored_replies

    @property
    def status(self) -> ConnectionStatus:
        match self._state.value:
            case Session() as session:
                return ConnectionStatus.BLOCKED if session.is_blocked else ConnectionStatus.CONNECTED
            case _Down(error=None):
                return ConnectionStatus.RECONNECTING
            case _:
                return ConnectionStatus.CLOSED

    @property
    def in_flight(self) -> int:
        """The number of calls in flight on the present connection."""
        state = self._state.value
        return state.in_flight if isinstance(state, Session) else 0

    @property
    def ignored_replies(self) -> int:
        """The number of answers without a waiting call: repeated, or too late."""
        state = self._state.value
        return self._ignored_replies + (state.ignored_replies if isinstance(state, Session) else 0)

    async def call(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        on_progress: ProgressCallback | None = None,
        on_starting: StartCallback | None = None,
        on_jobs: JobsCallback | None = None,
        idempotent: bool = False,
        raise_on_error: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Reply:
        """Send a request and wait for its last answer.

        `body`: bytes are sent unchanged, other values as JSON. `on_progress` is called with every progress or
        partial answer. `on_starting` is called every few seconds with a `StartProgress` (position in the queue of
        starts, expected time) while the key's worker starts, and `on_jobs` every second with a `JobProgress` while
        Spark runs jobs of the request. `idempotent=True` sends the request again when the connection is lost before the
        answer. Cancelling the task also cancels the request in the worker. For the other
        keywords see `RequestOptions`.

        Raises the subclass of `RequestError` for the status of the answer (with `raise_on_error=False` the answer is
        returned instead), `RequestTimeoutError` if no answer comes, `ConnectionLostError` and `PoolNotFoundError`.
        """
        request = self._build(
            key, path, body, options, wants_progress=on_progress is not None, wants_job_progress=on_jobs is not None
        )
        reply = await self._attempt(
            request,
            lambda session: session.call(request, on_progress, on_starting, on_jobs=on_jobs),
            idempotent=idempotent,
        )
        if raise_on_error and (error := error_from_reply(reply, key=key, path=path)) is not None:
            raise error
        return reply

    async def stream(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        on_starting: StartCallback | None = None,
        idempotent: bool = False,
        raise_on_error: bool = True,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Reply, None]:
        """Like `call`, but iterate over the progress and partial answers (`progress` is True) and then the last one.

        Leaving the iteration early cancels the request: close the iterator (`contextlib.aclosing`) to do so at once.
        """
        request = self._build(key, path, body, options, wants_progress=True)
        replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        attempt = self._attempt(
            request, lambda session: session.call(request, replies.put_nowait, on_starting), idempotent=idempotent
        )
        call = asyncio.create_task(attempt, name="osrdyne client stream")
        call.add_done_callback(lambda _: replies.put_nowait(None))
        try:
            while (reply := await replies.get()) is not None:
                yield reply
            last = call.result()
            if raise_on_error and (error := error_from_reply(last, key=key, path=path)) is not None:
                raise error
            yield last
        finally:
            # An iteration that is left early: cancelling the call cancels its request as well.
            call.cancel()
            await asyncio.wait({call})

    async def call_batches(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        credit: int = DEFAULT_CREDIT,
        idempotent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Any, None]:
        """Send a request whose answer is a table, and iterate over its `pyarrow.RecordBatch`es as the worker makes
        them.

        At most `credit` parts of 4 MiB are on their way at a time: a slow caller slows the worker down, and the memory
        of both is bounded. `timeout` is the time for the whole stream. Leaving the iteration early cancels the request:
        close the iterator (`contextlib.aclosing`) to do so at once. A pool that cannot stream answers in one message.

        Raises what `call` raises, also after some batches, which are then incomplete. In particular
        `StreamInterruptedError`, if the worker was lost after the first batch; before that, the stream of the next
        worker is used. Raises `ConfigurationError` without pyarrow, and `InvalidMessageError` if the answer is no
        table.
        """
        decoder = BatchDecoder()
        parts = self.call_parts(key, path, body, credit=credit, idempotent=idempotent, **options)
        async with aclosing(parts):
            async for part in parts:
                for batch in decoder.decode(part):
                    yield batch

    async def call_parts(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        credit: int = DEFAULT_CREDIT,
        idempotent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[bytes, None]:
        """Like `call_batches`, but iterate over the undecoded parts. Written to a file one after the other, they are
        one Arrow IPC stream. Needs no pyarrow."""
        if not 1 <= credit <= MAX_CREDIT:
            raise ValueError(f"credit must be a whole number from 1 to {MAX_CREDIT}, not {credit!r}")
        request = self._build(key, path, body, {**options, "accept": ARROW_TYPE}, credit=credit)
        parts = PartQueue(credit=credit)

        async def operation(session: Session) -> Reply:
            if parts.handed_out:
                raise StreamInterruptedError("The connection was lost within the streamed answer.", key=key, path=path)
            parts.repeat()
            return await session.call(request, parts.arrived, ends=parts.ends)

        attempt = self._attempt(request, operation, idempotent=idempotent)
        call = asyncio.create_task(attempt, name="osrdyne client stream")
        call.add_done_callback(lambda _: parts.end())
        granting = asyncio.create_task(self._keep_granting(parts), name="osrdyne client credit")
        try:
            while (part := await parts.next()) is not None:
                yield part
                parts.consumed()
                await self._grant(parts)
            last = call.result()
            if (error := error_from_reply(last, key=key, path=path)) is not None:
                raise error
            require_arrow(last)
            if last.body:
                yield last.body
        finally:
            # An iteration that is left early: cancelling the call cancels its request as well.
            call.cancel()
            granting.cancel()
            await asyncio.wait({call, granting})

    async def _keep_granting(self, parts: PartQueue) -> None:
        """Repeat the credit of a stream while its caller processes a part, however long that takes."""
        while True:
            await self._clock.sleep(GRANT_INTERVAL)
            with suppress(OsrdyneError):  # the next grant of the caller raises it
                await self._grant(parts)

    async def _grant(self, parts: PartQueue) -> None:
        session = self._state.value
        if (grant := parts.grant) is not None and isinstance(session, Session):
            await session.grant(grant, parts.worker_id)

    async def cast(
        self,
        key: str,
        path: str = "",
        body: object = None,
        *,
        idempotent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Send a request without an answer; return once RabbitMQ has confirmed it.

        It has a deadline only if `timeout` is given; otherwise the pool decides how long it may wait.
        """
        request = self._build(key, path, body, options, one_way=True)
        await self._attempt(request, lambda session: session.publish(request), idempotent=idempotent)

    async def cancel(self, correlation_id: str) -> bool:
        """Cancel a call in flight. It ends with `RequestCancelledError`, or with its answer if the worker was faster.

        Returns False if no call with this correlation id is in flight.
        """
        state = self._state.value
        return isinstance(state, Session) and await state.cancel(correlation_id)

    def _build(
        self,
        key: str,
        path: str,
        body: object,
        options: RequestOptions,
        *,
        one_way: bool = False,
        wants_progress: bool = False,
        wants_job_progress: bool = False,
        credit: int | None = None,
    ) -> OutgoingRequest:
        timeout, slack = options.get("timeout"), options.get("answer_slack")
        return build_request(
            key,
            path,
            body,
            correlation_id=options.get("correlation_id") or f"{self._id_prefix}-{next(self._id_counter):x}",
            times=CallTimes(
                now=self._clock.time(),
                timeout=self._default_timeout if timeout is None else timeout,
                answer_slack=self._answer_slack if slack is None else slack,
                has_deadline=timeout is not None or not one_way,
            ),
            sender=Sender(self._options.name, self._user_id, self._token() if callable(self._token) else self._token),
            answer=WantedAnswer(None if one_way else DIRECT_REPLY_TO, wants_progress, wants_job_progress, credit),
            options=options,
        )

    async def _attempt(
        self, request: OutgoingRequest, operation: Callable[[Session], Awaitable[T]], *, idempotent: bool
    ) -> T:
        """Run `operation` on a session, and again on the next one if the request was not sent or is idempotent. Stops
        at the deadline, and for a request that was sent `answer_slack` later."""
        try:
            async with _time_limit(request) as limit:
                while True:
                    session = await self._session()
                    try:
                        return await operation(session)
                    except ConnectionLostError:
                        # Sent and unanswered: the request may have run. Only the caller can say whether a second run
                        # does harm.
                        if request.sent and not idempotent:
                            raise
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._timed_out(request) from None

    async def _session(self) -> Session:
        """Wait for a usable session and return it. Raises the error of a client that gets no other session."""
        while True:
            state = self._state.value
            if isinstance(state, Session) and not state.is_over:
                return state
            if isinstance(state, _Down) and state.error is not None:
                raise state.error
            await self._state.changed()

    def _timed_out(self, request: OutgoingRequest) -> RequestTimeoutError:
        reason = f"it was not sent: {self._obstacle()}"
        if request.sent:
            # During an alarm RabbitMQ sends `connection.blocked` after the first publish, which it does not read.
            state = self._state.value
            blocked = f": {_BLOCKED}" if isinstance(state, Session) and state.is_blocked else ""
            reason = f"there was no answer{blocked}"
        return RequestTimeoutError(
            f"The request was given up after {request.timeout:g} s; {reason}.",
            sent=request.sent,
            key=request.key,
            path=request.path,
        )

    def _obstacle(self) -> str:
        match self._state.value:
            case _Down(reason=reason):
                return reason
            case Session(is_blocked=True):
                return _BLOCKED
            case _:
                return "RabbitMQ did not answer"

    async def _keep_connected(self, session: Session) -> None:
        """Serve a session; when it is lost, open the next one. Returns only if reconnecting is off."""
        while True:
            reason = await session.serve()
            self._ignored_replies += session.ignored_replies
            self._state.set(_Down(str(reason)))
            log.warning("connection lost", error=str(reason))
            if self._reconnect is None:
                self._state.set(_Down(str(reason), BrokerUnavailableError("The connection to RabbitMQ was lost.")))
                return
            session = await self._reopen(self._reconnect)
            self._state.set(session)
            log.info("reconnected")

    async def _reopen(self, backoff: Backoff) -> Session:
        for failures in itertools.count(1):
            await self._clock.sleep(backoff.delay(failures))
            try:
                return await Session.open(self._names, self._options)
            except OsrdyneError as error:
                self._state.set(_Down(str(error)))
                log.warning("broker unreachable", error=str(error), failures=failures)
        raise AssertionError("unreachable")


@asynccontextmanager
async def _time_limit(request: OutgoingRequest) -> AsyncGenerator[asyncio.Timeout, None]:
    """Limit the time of a request: to its deadline as long as it is not sent, because no answer can come then, and to
    `answer_slack` after that if it is."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(request.timeout + request.answer_slack) as limit:

        def end_unsent() -> None:
            if not request.sent and not limit.expired():  # without any slack, it may be over already
                limit.reschedule(loop.time())

        deadline = loop.call_later(request.timeout, end_unsent)
        try:
            yield limit
        finally:
            deadline.cancel()


def _down_for_good(reason: str) -> _Down:
    return _Down(reason, ClientClosedError(reason))

"""Replies: publish a `Response` to the caller's reply queue, with a confirm. Called by the processor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Message
from osrdyne.amqp.direct_reply_to import DIRECT_REPLY_TO, GuardedChannel, last_attempt, publish_reply
from osrdyne.errors import AddressRefusedError, MessageTooLargeError, OsrdyneError
from osrdyne.logs import get_logger
from osrdyne.protocol.messages import Request, Response
from osrdyne_worker.app.call import Answer
from osrdyne_worker.app.codec import answer_to_response, error_response, shown_path
from osrdyne_worker.app.errors import CallCancelledError, RequestError, answer_too_large
from osrdyne_worker.requests.inflight import InFlight

CANCEL_CHECK_INTERVAL = 0.5
"""Seconds between two checks whether the call was cancelled, while a thread waits for the confirm of its progress."""

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class ReplySender:
    """Sends the replies of one worker."""

    worker_id: str
    max_bytes: int
    clock: Clock
    reference_statuses: bool = False

    async def send(
        self,
        channel: Channel | GuardedChannel,
        request: Request,
        response: Response,
        *,
        on_wait: Callable[[OsrdyneError], None] | None = None,
    ) -> Response:
        """Publish with a confirm; do nothing for a request without a usable reply address.

        Returns the response that was sent: an `error` in place of one that AMQP cannot carry. If the reply queue is
        full, tries again a few times, and then raises `PublishRefusedError`. With `on_wait`, which is called then, it
        is tried until the deadline of the request, also while RabbitMQ refuses the user (`BrokerAccessError`).
        """
        if request.reply_to is None:
            return response
        sent = fitting(response, request, self.max_bytes)
        try:
            await self._publish(channel, request, self._message(request, sent), on_wait)
        except (TypeError, ValueError, MessageTooLargeError) as error:  # invalid headers set by a handler
            log.error("reply has invalid headers", path=shown_path(request.path), reason=str(error))
            sent = unsendable(error, request, response)
            await self._publish(channel, request, self._message(request, sent), on_wait)
        return sent

    def _message(self, request: Request, response: Response) -> Message:
        return reply_message(request, response, worker_id=self.worker_id, reference_statuses=self.reference_statuses)

    async def _publish(
        self,
        channel: Channel | GuardedChannel,
        request: Request,
        message: Message,
        on_wait: Callable[[OsrdyneError], None] | None,
    ) -> None:
        until = None if on_wait is None else last_attempt(request.deadline_ms, clock=self.clock)
        try:
            # Crash before the confirm: the request is delivered again and runs twice. After it: it is answered twice.
            await publish_reply(
                lambda: channel.publish(message, exchange="", routing_key=request.reply_to or ""),
                clock=self.clock,
                until=until,
                on_wait=on_wait or (lambda _: None),
            )
        except AddressRefusedError as error:
            # RabbitMQ cannot decode the address: a further attempt would close the connection again.
            log.warning("reply dropped, invalid reply address", reason=error.message)


class ProgressSender:
    """Sends progress: non-terminating replies. Created on the event loop; `send` may be called from any thread."""

    def __init__(self, replies: ReplySender, spawn: Callable[..., asyncio.Future[None]]) -> None:
        self._replies = replies
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def send(self, job: InFlight, answer: Answer) -> None:
        """Send one value. In a thread, waits for the confirm. On the event loop, the final answer waits for it."""
        sending = self._replies.send(job.broker.replies, job.request, answer_to_response(answer, progress=True))
        if threading.get_ident() != self._loop_thread:
            _wait(job, asyncio.run_coroutine_threadsafe(sending, self._loop))
            return
        task = self._spawn(_without_errors(sending))
        job.progress.add(task)
        task.add_done_callback(job.progress.discard)


def _wait(job: InFlight, future: Future[Response]) -> None:
    while True:
        try:
            future.result(timeout=CANCEL_CHECK_INTERVAL)
            return
        except TimeoutError:
            # A handler that waits for a blocked connection must notice that it was cancelled.
            job.call.raise_if_cancelled()
        except OsrdyneError as error:
            raise CallCancelledError("The progress could not be sent.") from error


async def _without_errors(sending: Coroutine[Any, Any, object]) -> None:
    """Send without raising: no handler waits for it. If the connection is lost, the final answer fails as well."""
    try:
        await sending
    except OsrdyneError as error:
        log.debug("progress not sent", reason=error.message)


def fitting(response: Response, request: Request, max_bytes: int) -> Response:
    """Return the response, or an `error` in its place if it is too large."""
    if len(response.body) <= max_bytes:
        return response
    size = len(response.body)
    refusal = answer_too_large(f"has {size} bytes", size, max_bytes)
    return replace(error_response(refusal, path=request.path), progress=response.progress)


def unsendable(error: Exception, request: Request, response: Response) -> Response:
    """Return an `error` in place of a response whose headers AMQP cannot carry."""
    what = "are too large" if isinstance(error, MessageTooLargeError) else "cannot be sent"
    refusal = RequestError(f"The headers of the answer {what}: {error}", code=500, error_code="invalid_answer")
    return replace(error_response(refusal, path=request.path), progress=response.progress)


def reply_message(request: Request, response: Response, *, worker_id: str, reference_statuses: bool = False) -> Message:
    """The message for a response. Direct reply-to is never stored: only other reply queues get persistent messages."""
    return Message(
        body=response.body,
        headers=response.wire_headers(worker_id=worker_id, reference_statuses=reference_statuses),
        correlation_id=request.correlation_id,
        content_type=response.content_type,
        persistent=not (request.reply_to or "").startswith(DIRECT_REPLY_TO),
    )

"""Replies: from a `Response` to a confirmed message in the caller's queue. Called by the processor, before it
acknowledges the request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Channel, Message
from osrdyne.amqp.direct_reply_to import DIRECT_REPLY_TO, GuardedChannel
from osrdyne.amqp.reply_retry import publish_reply
from osrdyne.errors import AddressRefusedError, MessageTooLargeError
from osrdyne.logs import get_logger
from osrdyne.protocol.messages import Request, Response, header_text
from osrdyne_worker.app.call import RequestError
from osrdyne_worker.app.codec import error_response

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class ReplySender:
    """Sends the replies of one worker."""

    worker_id: str
    max_bytes: int
    clock: Clock
    reference_statuses: bool = False

    async def send(self, channel: Channel | GuardedChannel, request: Request, response: Response) -> None:
        """Publish with a confirm; nothing for a request that wants no reply.

        A reply queue that refuses (it is full) is tried a few times, then `PublishRefusedError` is raised. An address
        that nobody can answer to is like none.
        """
        if request.reply_to is None:
            return
        message = self._message(request, fitting(response, request, self.max_bytes))
        try:
            await self._publish(channel, request.reply_to, message)
        except (TypeError, ValueError, MessageTooLargeError) as error:  # what a handler put into the headers
            log.error("the headers of a reply cannot be sent", path=header_text(request.path), reason=str(error))
            message = self._message(request, unsendable(error, request, response))
            await self._publish(channel, request.reply_to, message)

    def _message(self, request: Request, response: Response) -> Message:
        return reply_message(request, response, worker_id=self.worker_id, reference_statuses=self.reference_statuses)

    async def _publish(self, channel: Channel | GuardedChannel, reply_to: str, message: Message) -> None:
        try:
            await publish_reply(
                lambda: channel.publish(message, exchange="", routing_key=reply_to),
                clock=self.clock,
            )
        except AddressRefusedError as error:
            log.warning("nobody can be answered", reason=error.message)


def fitting(response: Response, request: Request, max_bytes: int) -> Response:
    """The response, or an `error` that says why it cannot be sent."""
    if len(response.body) <= max_bytes:
        return response
    refusal = RequestError(
        f"The answer has {len(response.body)} bytes; at most {max_bytes} can be sent. Ask for less at once.",
        code=413,
        error_code="answer_too_large",
        details={"size_bytes": len(response.body), "max_bytes": max_bytes},
    )
    return replace(error_response(refusal, path=request.path), progress=response.progress)


def unsendable(error: Exception, request: Request, response: Response) -> Response:
    """The `error` in place of a response whose headers AMQP cannot carry; its own are small."""
    what = "are too large" if isinstance(error, MessageTooLargeError) else "cannot be sent"
    refusal = RequestError(f"The headers of the answer {what}: {error}", code=500, error_code="invalid_answer")
    return replace(error_response(refusal, path=request.path), progress=response.progress)


def reply_message(request: Request, response: Response, *, worker_id: str, reference_statuses: bool = False) -> Message:
    """The message for a response. Direct reply-to is never stored, so that only other queues get a persistent one."""
    return Message(
        body=response.body,
        headers=replace(response, worker_id=worker_id).wire_headers(reference_statuses=reference_statuses),
        correlation_id=request.correlation_id,
        content_type=response.content_type,
        persistent=not (request.reply_to or "").startswith(DIRECT_REPLY_TO),
    )

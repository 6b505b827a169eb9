"""The controller's own answers: published to the client's reply queue with a confirm, before the request is
acknowledged."""

from __future__ import annotations

import json
from functools import partial

from osrdyne.amqp import Message
from osrdyne.amqp.direct_reply_to import publish_reply
from osrdyne.errors import BrokerSilentError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.processors.forgeries import Forgeries
from osrdyne.protocol.messages import JSON_TYPE, Request, Response, header_text
from osrdyne.protocol.statuses import Status


class Replier:
    """Publishes answers: a status, a sentence with cause and remedy, and facts as JSON."""

    def __init__(self, context: TermContext, *, publisher: Publisher, forgeries: Forgeries) -> None:
        self._clock, self._metrics = context.clock, context.metrics
        self._publisher = publisher
        self._forgeries = forgeries
        self._reference_statuses = context.settings.requests.statuses == "reference"
        self._log: Logger = get_logger("replies", pool=context.names.pool)

    async def answer(
        self,
        request: Request,
        status: Status | str,
        detail: str,
        *,
        retry_after: float | None = None,
        code: int | None = None,
        facts: dict[str, object] | None = None,
        subject: str | None = None,
    ) -> None:
        """Answer a request; one without `reply-to` gets no answer.

        Returns when RabbitMQ has confirmed the answer, or when no queue can take it (the reply queue is gone, is still
        full after a few attempts, or has no leader). That is counted, and the caller may acknowledge the request.
        `code`: None for that of the status. `subject`: the member of the body that has the answer; by default
        `discarded` for the status ok, else `error`.
        """
        # A refused address counts as answered: the caller of this method acknowledges the request.
        if request.reply_to is None or self._forgeries.refuses_reply_to(request, component="replies"):
            return
        # The detail becomes a header value, without line feeds and of limited length; it may hold text of the client.
        detail = header_text(detail)
        subject = subject or ("discarded" if status == Status.OK else "error")
        body = {subject: {"code": str(status), "message": detail, "path": request.path, **(facts or {})}}
        response = Response(
            status=status,
            code=code,
            detail=detail,
            retry_after=retry_after,
            body=json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"),
            content_type=JSON_TYPE,
        )
        message = Message(
            body=response.body,
            headers=response.wire_headers(reference_statuses=self._reference_statuses),
            correlation_id=request.correlation_id,
            content_type=response.content_type,
        )
        try:
            # Never mandatory: RabbitMQ 3.10 returns replies to direct reply-to although it delivers them (broker:
            # replies-are-never-mandatory).
            await publish_reply(
                partial(self._publisher.publish, message, exchange="", routing_key=request.reply_to), clock=self._clock
            )
        except (PublishRefusedError, BrokerSilentError) as error:
            self._metrics.replies_failed.inc()
            self._log.warning("answer not delivered", key=request.key, status=str(status), error=str(error))

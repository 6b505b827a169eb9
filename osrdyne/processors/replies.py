"""The controller's own answers: published to the client's reply queue with a confirm, before the request is
acknowledged.

An answer that its reply queue does not take, because it is full or the daemon may not publish to it, is tried until the
deadline of its request. The request stays unacknowledged meanwhile, and others are answered.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from osrdyne.amqp import Message
from osrdyne.amqp.direct_reply_to import last_attempt, publish_reply
from osrdyne.errors import (
    BrokerAccessError,
    BrokerError,
    BrokerSilentError,
    OsrdyneError,
    PublishRefusedError,
    QueueFullError,
)
from osrdyne.findings import Finding
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.processors.forgeries import Forgeries
from osrdyne.protocol.activity import FULL_QUEUE, NO_PERMISSION
from osrdyne.protocol.messages import JSON_TYPE, Request, Response, header_text
from osrdyne.protocol.statuses import Status

MAX_WAITING = 1000  # Each holds its request in memory, and some a channel. Those beyond it are dropped after 2 seconds.
MAX_WAITING_BYTES = 128 * 1024 * 1024  # Of the requests of these answers: others must still be taken.
MAX_WAITING_OF_QUEUE, MAX_WAITING_BYTES_OF_QUEUE = 200, 32 * 1024 * 1024
"""The same for one full reply queue: a client must not take the places of the others."""
COMPONENT = "answers"
_REASONS = {FULL_QUEUE: "full reply queues", NO_PERMISSION: "no permission for the default exchange"}
SetAside = Callable[[], None]


@dataclass(slots=True)
class _Wait:
    """An answer that waits. `reason`: why its queue did not take it last. `size`: bytes of its request."""

    address: str
    reason: str
    size: int


async def until_set_aside(
    group: asyncio.TaskGroup,
    work: Callable[[SetAside], Coroutine[Any, Any, None]],
    *,
    name: str,
    on_late_error: Callable[[BrokerError], None] | None = None,
) -> None:
    """Run `work`, which answers one request, in a task of `group`: until it ends, or its answer waits for its reply
    queue. Raises its `BrokerError`. `on_late_error`: gets one that comes after that; without it, the group fails.
    """
    aside, failed = asyncio.Event(), list[BrokerError]()

    async def run() -> None:
        try:
            await work(aside.set)
        except BrokerError as error:
            if not aside.is_set():
                failed.append(error)
            elif on_late_error is None:
                raise
            else:
                on_late_error(error)
        finally:
            aside.set()

    group.create_task(run(), name=name)
    await aside.wait()
    for error in failed:
        raise error


def _shown(counts: Mapping[str, int]) -> list[str]:
    return [f"{count} for {_REASONS[reason]}" for reason, count in sorted(counts.items())]


class Replier:
    """Publishes answers: a status, a sentence with cause and remedy, and facts as JSON."""

    def __init__(self, context: TermContext, *, publisher: Publisher, forgeries: Forgeries) -> None:
        self._clock, self._metrics = context.clock, context.metrics
        self._publisher = publisher
        self._forgeries = forgeries
        self._reference_statuses = context.settings.requests.statuses == "reference"
        self._waiting: dict[asyncio.Task[object], _Wait] = {}
        self._finished = False
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
        set_aside: SetAside,
    ) -> None:
        """Answer a request; one without `reply-to` gets no answer.

        Returns when RabbitMQ has confirmed the answer, or when no queue can take it (the reply queue is gone, has no
        leader, or is full for too long). That is counted, and the caller may acknowledge the request.
        `set_aside`: called when the answer will be tried until the deadline of the request, so that the caller goes on
        with others. The task must be one of this answer alone: it is cancelled at the end of the term.
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
            await self._publish(message, request, set_aside)
        except (PublishRefusedError, BrokerSilentError, BrokerAccessError) as error:
            self._metrics.replies_failed.inc()
            self._log.warning("answer not delivered", key=request.key, status=str(status), error=str(error))

    async def _publish(self, message: Message, request: Request, set_aside: SetAside) -> None:
        address, task = request.reply_to or "", asyncio.current_task()
        assert task is not None

        async def publish() -> None:
            try:
                # Never mandatory: RabbitMQ 3.10 returns replies to direct reply-to although it delivers them (broker:
                # replies-are-never-mandatory).
                await self._publisher.publish(message, exchange="", routing_key=address)
            except (QueueFullError, BrokerAccessError) as error:
                reason = FULL_QUEUE if isinstance(error, QueueFullError) else NO_PERMISSION
                if (waiting := self._waiting.get(task)) is not None:
                    waiting.reason = reason
                elif self._finished:
                    task.cancel()  # as `finish` does
                elif self._has_room(wait := _Wait(address, reason, len(request.body))):
                    # Crash from here on: the request returns to its queue, and the next leader answers it.
                    self._waiting[task] = wait
                    set_aside()
                raise

        def check(_: OsrdyneError) -> None:
            if task not in self._waiting:
                raise PublishRefusedError("The answer was refused, and no further one may wait until its deadline.")
            self._log.warning("answer refused, it is tried until the deadline", key=request.key)

        try:
            until = last_attempt(request.deadline_ms, clock=self._clock)
            await publish_reply(publish, clock=self._clock, until=until, on_wait=check)
        finally:
            self._waiting.pop(task, None)

    def _has_room(self, wait: _Wait) -> bool:
        others = [*self._waiting.values()]
        if len(others) >= MAX_WAITING or sum(other.size for other in others) + wait.size > MAX_WAITING_BYTES:
            return False
        of_queue = [other.size for other in others if other.address == wait.address]
        if wait.reason != FULL_QUEUE:
            return True
        return len(of_queue) < MAX_WAITING_OF_QUEUE and sum(of_queue) + wait.size <= MAX_WAITING_BYTES_OF_QUEUE

    def finding(self, of_workers: Mapping[str, int]) -> Finding | None:
        """The finding for `status` and `doctor`: how many answers wait, and why. None if none does. `of_workers`: those
        that workers report, by reason."""
        own = Counter(waiting.reason for waiting in self._waiting.values())
        parts = [
            f"answers of the {who} wait until their deadline: {', '.join(_shown(counts))}"
            for who, counts in (("controller", own), ("workers", of_workers))
            if counts
        ]
        return Finding(COMPONENT, False, "; ".join(parts), fatal=False) if parts else None

    def finish(self) -> None:
        """Give up the answers that wait, because the term ends: RabbitMQ returns their requests to their queues, and
        the next leader answers them."""
        self._finished = True
        for task in self._waiting:
            task.cancel()

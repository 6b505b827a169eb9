"""Failed requests that are tried again: whether, and the way into the queue where they wait.

`plan_retry` decides from what the request carries; `Retries` publishes. Called by the processor before it would answer.
Source: docs/reference/protocol/workers.md, "Tried again"; Gateleen queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from osrdyne.amqp import Delivery, Message
from osrdyne.errors import BrokerError, MessageTooLargeError
from osrdyne.logs import get_logger
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import (
    DUPLICATE_HEADER,
    FAILED_DELIVERIES_HEADER,
    HOPS_HEADER,
    Request,
    Response,
    header_text,
)
from osrdyne.protocol.names import priority_of
from osrdyne.protocol.retries import (
    ATTEMPTS_HEADER,
    CALLERS_PREFIX,
    CLASS_HEADER,
    DELAY_HEADER,
    class_of,
    read_attempts,
    read_class,
    read_terms,
)
from osrdyne.protocol.statuses import Status, decode_text
from osrdyne_worker.runtime.connection import Link

MAX_WARNED = 100

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class Retry:
    """A further try, `delay_ms` from now; `attempts` were made so far, this one included."""

    delay_ms: int
    attempts: int


def plan_retry(request: Request, response: Response, *, now_ms: int) -> Retry | None:
    """The further try of a request with this outcome; None: the outcome is the answer."""
    terms, code = read_terms(request.headers), response.told_code
    if terms is None or code is None or response.status in {Status.CANCELLED, Status.POISON} or not terms.covers(code):
        return None
    attempts = read_attempts(request.headers) + 1
    if attempts >= terms.max_attempts or _is_forbidden(request.headers, code):
        return None
    delay_ms = terms.delay_ms(attempts)
    if request.deadline_ms is not None and request.deadline_ms < now_ms + delay_ms:
        return None  # it would expire, which says less than this outcome
    return Retry(delay_ms, attempts)


def callers_word(headers: Mapping[str, object], code: int) -> tuple[str, object] | None:
    """The header, and its value, in which the caller says something about this code; the exact one beats the class."""
    told = {name.lower(): value for name, value in headers.items() if name.lower().startswith(CALLERS_PREFIX)}
    for name in (f"{CALLERS_PREFIX}{code}", f"{CALLERS_PREFIX}{class_of(code)}"):
        if name in told:
            return name, told[name]
    return None


def is_zero(value: object) -> bool:
    """Whether a caller's word forbids; any other has no meaning."""
    text = decode_text(value)
    return text.strip() == "0" if text is not None else value == 0 and not isinstance(value, bool)


def _is_forbidden(headers: Mapping[str, object], code: int) -> bool:
    word = callers_word(headers, code)
    return word is not None and is_zero(word[1])


def retry_message(delivery: Delivery, request: Request, retry: Retry) -> Message:
    """The request as it goes to wait: without `expiration`, which would end it there. Its hops and failed deliveries
    are those of this attempt."""
    left_out = {HOPS_HEADER, FAILED_DELIVERIES_HEADER}
    headers = {name: value for name, value in delivery.headers.items() if name not in left_out}
    headers |= {ATTEMPTS_HEADER: retry.attempts, DELAY_HEADER: str(retry.delay_ms)}
    if request.deadline_ms is not None:
        headers[DEADLINE_HEADER] = request.deadline_ms
    if delivery.redelivered:  # an earlier try may have gone to wait as well
        headers[DUPLICATE_HEADER] = True
    return delivery.to_message(headers=headers, expiration=None)


def counted(request: Request, response: Response) -> Response:
    """The answer, with the number of attempts where there was more than one."""
    before = read_attempts(request.headers)
    return replace(response, headers={**response.headers, ATTEMPTS_HEADER: before + 1}) if before else response


def class_of_delivery(delivery: Delivery) -> int | None:
    """The priority class of a request; one that has waited comes from another exchange than that of its class."""
    headers = delivery.headers
    return read_class(headers) if CLASS_HEADER in headers else priority_of(delivery.exchange)


class Retries:
    """Sends requests of one worker to wait; `exchange` is None in a pool that has no retries."""

    def __init__(self, exchange: str | None) -> None:
        self._exchange = exchange
        self._warned: set[str] = set()

    @property
    def of_managed_pool(self) -> bool:
        """Whether an ingress has written what requests say of route, class and retries."""
        return self._exchange is not None

    def plan(self, request: Request, response: Response, *, now_ms: int) -> Retry | None:
        """As `plan_retry`; warns once of what a caller says that has no meaning."""
        if not self.of_managed_pool:
            return None
        retry = plan_retry(request, response, now_ms=now_ms)
        word = callers_word(request.headers, response.told_code or 0) if retry is not None else None
        if word is not None and word[0] not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(word[0])
            log.warning("only 0 has a meaning in this header", header=word[0])
        return retry

    async def send(self, link: Link, delivery: Delivery, request: Request, retry: Retry) -> bool:
        """Publish with a confirm; False when RabbitMQ does not take it, so that its outcome must be the answer.

        Raises `BrokerError` when the link is lost: then RabbitMQ delivers the request again.
        """
        assert self._exchange is not None
        message = retry_message(delivery, request, retry)
        try:
            channel = await link.retry_channel()
            await channel.publish(message, exchange=self._exchange, routing_key=delivery.routing_key, mandatory=True)
        except (BrokerError, MessageTooLargeError) as error:
            if link.is_closed:
                raise
            log.error(
                "a request cannot wait for its next attempt, it is answered",
                path=header_text(request.path, limit=200),
                delay_ms=retry.delay_ms,
                reason=str(error),
            )
            return False
        return True

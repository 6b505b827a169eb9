"""Retries of failed requests: the decision, and the copy of the request that waits for its next attempt.

`plan_retry` decides from the headers of the request; `Retries` publishes. Called by the processor before it would
answer. Source: docs/reference/protocol/workers.md, "Tried again"; Gateleen queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from osrdyne.amqp import Delivery, Message
from osrdyne.errors import BrokerError, MessageTooLargeError
from osrdyne.logs import get_logger
from osrdyne.protocol.messages import (
    DUPLICATE_HEADER,
    FAILED_DELIVERIES_HEADER,
    HOPS_HEADER,
    PUT_BACKS_HEADER,
    Request,
    Response,
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
from osrdyne_worker.app.codec import shown_path
from osrdyne_worker.runtime.connection import BrokerConnection

MAX_WARNED = 100

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class Retry:
    """A further attempt, `delay_ms` from now; `attempts` were made so far, this one included."""

    delay_ms: int
    attempts: int


def plan_retry(request: Request, response: Response, *, now_ms: int) -> Retry | None:
    """The retry of a request with this response; None: the response is the answer."""
    terms, code = read_terms(request.headers), response.effective_code
    if terms is None or code is None or response.status in {Status.CANCELLED, Status.POISON} or not terms.covers(code):
        return None
    attempts = read_attempts(request.headers) + 1
    if attempts >= terms.max_attempts or _is_forbidden(request.headers, code):
        return None
    delay_ms = terms.delay_ms(attempts)
    if request.deadline_ms is not None and request.deadline_ms < now_ms + delay_ms:
        return None  # it would expire, and this response has more information than `expired`
    return Retry(delay_ms, attempts)


def callers_header(headers: Mapping[str, object], code: int) -> tuple[str, object] | None:
    """Return the caller's header for this code, and its value. That of the code takes precedence over its class."""
    found = {name.lower(): value for name, value in headers.items() if name.lower().startswith(CALLERS_PREFIX)}
    for name in (f"{CALLERS_PREFIX}{code}", f"{CALLERS_PREFIX}{class_of(code)}"):
        if name in found:
            return name, found[name]
    return None


def is_zero(value: object) -> bool:
    """Whether the value of a caller's header forbids retries; other values have no meaning."""
    text = decode_text(value)
    return text.strip() == "0" if text is not None else value == 0 and not isinstance(value, bool)


def _is_forbidden(headers: Mapping[str, object], code: int) -> bool:
    header = callers_header(headers, code)
    return header is not None and is_zero(header[1])


def retry_message(delivery: Delivery, retry: Retry) -> Message:
    """The copy of a request that waits for its next attempt. It has no `expiration`, which would end it meanwhile."""
    left_out = {HOPS_HEADER, FAILED_DELIVERIES_HEADER, PUT_BACKS_HEADER}  # each attempt has its own counts
    headers = {name: value for name, value in delivery.headers.items() if name not in left_out}
    # The deadline stays as the controller has set it, by its own clock.
    headers |= {ATTEMPTS_HEADER: retry.attempts, DELAY_HEADER: str(retry.delay_ms)}
    if delivery.redelivered:  # a worker may have published a copy already, before it was lost
        headers[DUPLICATE_HEADER] = True
    return delivery.to_message(headers=headers, expiration=None)


def with_attempts(request: Request, response: Response) -> Response:
    """Add the number of attempts to the answer if there was more than one."""
    before = read_attempts(request.headers)
    return replace(response, headers={**response.headers, ATTEMPTS_HEADER: before + 1}) if before else response


def priority_of_delivery(delivery: Delivery) -> int | None:
    """The priority level of a request in its pool; a retried one names it in a header, others by their exchange."""
    headers = delivery.headers
    return read_class(headers) if CLASS_HEADER in headers else priority_of(delivery.exchange)


class Retries:
    """Publishes the retries of one worker. `exchange` is None in a direct pool, which has no retries."""

    def __init__(self, exchange: str | None) -> None:
        self._exchange = exchange
        self._warned: set[str] = set()

    @property
    def of_managed_pool(self) -> bool:
        """Whether an ingress has written the headers about route, priority and retries."""
        return self._exchange is not None

    def plan(self, request: Request, response: Response, *, now_ms: int) -> Retry | None:
        """`plan_retry`, with one warning for each header of a caller whose value has no meaning."""
        if not self.of_managed_pool:
            return None
        retry = plan_retry(request, response, now_ms=now_ms)
        header = callers_header(request.headers, response.effective_code or 0) if retry is not None else None
        if header is not None and header[0] not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(header[0])
            log.warning("retry header ignored, only 0 has a meaning", header=header[0])
        return retry

    async def send(self, broker: BrokerConnection, delivery: Delivery, request: Request, retry: Retry) -> bool:
        """Publish the copy with a confirm; False if RabbitMQ refuses it: the response is then the answer.

        Raises `BrokerError` if the connection is lost: RabbitMQ then delivers the request again.
        """
        assert self._exchange is not None
        message = retry_message(delivery, retry)
        try:
            channel = await broker.retry_channel()
            # Crash before the confirm: RabbitMQ delivers the request again. Crash between the confirm and the
            # acknowledgement: the copy waits for its attempt, and the request is delivered again, a duplicate.
            await channel.publish(message, exchange=self._exchange, routing_key=delivery.routing_key, mandatory=True)
        except (BrokerError, MessageTooLargeError) as error:
            # RabbitMQ delivers the unacknowledged request again: it must not be answered as well.
            if broker.is_closed:
                raise
            log.error(
                "retry could not be published, request answered",
                path=shown_path(request.path),
                delay_ms=retry.delay_ms,
                reason=str(error),
            )
            return False
        return True

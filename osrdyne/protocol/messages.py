"""Headers and the request and response values. Source: docs/reference/protocol/requests.md and responses.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from osrdyne.protocol import deadlines
from osrdyne.protocol.statuses import CODES, REFERENCE_ERROR, Status, decode_text, encode_status

PATH_HEADER = "x-rpc-path"
STATUS_HEADER = "x-status"
FULL_STATUS_HEADER = "x-osrdyne-status"
CODE_HEADER = "x-code"
DETAIL_HEADER = "x-status-detail"
WORKER_ID_HEADER = "x-worker-id"
PROGRESS_HEADER = "x-non-terminating-response"
WANTS_PROGRESS_HEADER = "x-progress"
JOB_PROGRESS_HEADER = "x-job-progress"
"""Of a request: true if its client wants the progress of its jobs. Of a reply: true if its body is a `JobProgress`."""
RETRY_AFTER_HEADER = "x-retry-after"
NO_ACTIVATE_HEADER = "x-no-activate"
ACCEPT_HEADER = "accept"
AUTHORIZATION_HEADER = "authorization"
PRINCIPAL_HEADER = "x-osrdyne-principal"
HOPS_HEADER = "x-osrdyne-hops"
ROUTE_HEADER = "x-osrdyne-route"
COALESCE_HEADER = "x-osrdyne-coalesce"
DUPLICATE_HEADER = "x-osrdyne-duplicate"
FAILED_DELIVERIES_HEADER = "x-osrdyne-failed-deliveries"
PUT_BACKS_HEADER = "x-osrdyne-put-backs"
SPLIT_HEADER = "x-osrdyne-split-from"
REPLAY_HEADER = "x-osrdyne-replay"
PUBLISH_HEADER = "x-osrdyne-publish"
"""The number of the publish on its channel. Readers of osrdyne never see it (`amqp/publish_numbers.py`)."""
DELIVERY_COUNT_HEADER = "x-delivery-count"

JSON_TYPE = "application/json"
ARROW_TYPE = "application/vnd.apache.arrow.stream"

BROKER_HEADERS = frozenset(
    {
        "x-death",
        "x-first-death-exchange",
        "x-first-death-queue",
        "x-first-death-reason",
        "x-last-death-exchange",
        "x-last-death-queue",
        "x-last-death-reason",
        "x-delivery-count",
        "x-acquired-count",
    }
)
"""Headers that belong to the broker and are stripped before a message is republished (broker: strip-on-republish)."""

ROUTING_HEADERS = frozenset({"CC", "BCC"})
"""RabbitMQ delivers a message also to the routing keys in these headers (sender-selected distribution)."""

DETAIL_LIMIT = 2_000
"""Characters of a detail: it is a header, and all headers together must fit into one frame."""


def header_text(text: str, *, limit: int = DETAIL_LIMIT) -> str:
    """Cut the text, and replace characters that UTF-8 cannot encode: log lines and paths may contain any."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def encode_path(path: str) -> bytearray:
    """`x-rpc-path` on the wire: a byte array (AMQP type `x`), which the reference worker needs and ours reads."""
    return bytearray(path, "utf-8", "surrogateescape")


def wants_arrow(accept: str | None) -> bool:
    """Whether the caller accepts an Arrow IPC stream."""
    return any(part.partition(";")[0].strip().lower() == ARROW_TYPE for part in (accept or "").split(","))


def without_credentials(headers: Mapping[str, object]) -> dict[str, object]:
    """The headers without `authorization`, in any case."""
    return {name: value for name, value in headers.items() if name.lower() != AUTHORIZATION_HEADER}


def without_identity(headers: Mapping[str, object]) -> dict[str, object]:
    """The headers without `authorization` and the name of a principal, in any case: only the ingress may set the
    principal of a request."""
    return {name: value for name, value in headers.items() if name.lower() not in _IDENTITY}


def names_identity(headers: Mapping[str, object]) -> bool:
    """Whether `without_identity` would remove a header."""
    return any(name.lower() in _IDENTITY for name in headers)


_IDENTITY = frozenset({AUTHORIZATION_HEADER, PRINCIPAL_HEADER})


@dataclass(frozen=True, slots=True)
class Request:
    """One request, parsed from a delivery.

    `key` contains surrogates if the routing key is not UTF-8: check it with `names.parse_key` before use.
    """

    key: str
    body: bytes
    path: str = ""
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    deadline_ms: int | None = None
    headers: Mapping[str, object] = field(default_factory=dict)
    redelivered: bool = False

    @property
    def accept(self) -> str | None:
        return decode_text(self.headers.get(ACCEPT_HEADER))

    @property
    def principal(self) -> str | None:
        """Who sent the request, as identified by the ingress of a managed pool from the token."""
        return decode_text(self.headers.get(PRINCIPAL_HEADER))

    @property
    def no_activate(self) -> bool:
        return self.headers.get(NO_ACTIVATE_HEADER) is True

    @property
    def wants_progress(self) -> bool:
        """Whether the client requests progress replies; other clients may take the first reply for the last."""
        return self._wants(WANTS_PROGRESS_HEADER)

    @property
    def wants_job_progress(self) -> bool:
        """Whether the client requests replies about the progress of jobs."""
        return self._wants(JOB_PROGRESS_HEADER)

    def _wants(self, header: str) -> bool:
        value = self.headers.get(header)
        return value is True or decode_text(value) == "true"

    @property
    def delivery_count(self) -> int:
        """How often this request has returned to a queue, 0 at the first delivery; including returns before it was
        republished."""
        # RabbitMQ writes its count into what it delivers again. In a first delivery it is that of the publisher, which
        # may be a shovel from another queue.
        return (self._count(DELIVERY_COUNT_HEADER) if self.redelivered else 0) + self.failed_before

    @property
    def failed_before(self) -> int:
        """How many deliveries had failed, as far as they are evidence, when the controller republished this request."""
        return self._count(FAILED_DELIVERIES_HEADER)

    @property
    def put_backs(self) -> int:
        """How often the controller has put it back into its queue at its delivery limit."""
        return self._count(PUT_BACKS_HEADER)

    def _count(self, header: str) -> int:
        count = self.headers.get(header)
        # A client of a direct pool may send any number. A negative one would hide that its request ends workers.
        return max(0, count) if isinstance(count, int) else 0


@dataclass(frozen=True, slots=True)
class Response:
    """One answer. `progress`: it is non-terminating, and another one follows."""

    status: Status | str = Status.OK
    body: bytes = b""
    content_type: str | None = None
    code: int | None = None
    detail: str | None = None
    worker_id: str | None = None
    retry_after: float | None = None
    progress: bool = False
    headers: Mapping[str, object] = field(default_factory=dict)

    @property
    def effective_code(self) -> int | None:
        """The value of `x-code`: the response's own code, else the default of its status."""
        if self.code is None and self.status in CODES:
            return CODES[Status(self.status)]
        return self.code

    def wire_headers(self, *, worker_id: str | None = None, reference_statuses: bool = False) -> dict[str, object]:
        """The headers of the reply, in the types that the reference client reads.

        Without headers that route: in the default exchange, they could name any queue. `worker_id`: the worker that
        sends it, in place of `self.worker_id`. `reference_statuses` writes every status other than `ok` as
        `core_error`, and the status itself into `x-osrdyne-status`.
        """
        headers: dict[str, object] = {
            name: value for name, value in self.headers.items() if name not in ROUTING_HEADERS
        }
        is_mapped = reference_statuses and self.status != Status.OK
        headers[STATUS_HEADER] = encode_status(REFERENCE_ERROR if is_mapped else self.status)
        if is_mapped:
            headers[FULL_STATUS_HEADER] = str(self.status)
        if (code := self.effective_code) is not None:
            headers[CODE_HEADER] = code
        if self.detail is not None:
            headers[DETAIL_HEADER] = header_text(self.detail)
        if (sender := worker_id or self.worker_id) is not None:
            headers[WORKER_ID_HEADER] = sender
        if self.retry_after is not None:
            headers[RETRY_AFTER_HEADER] = self.retry_after
        if self.progress:
            headers[PROGRESS_HEADER] = True
        return headers

    @classmethod
    def from_wire(cls, *, headers: Mapping[str, object], body: bytes, content_type: str | None) -> Self:
        """Parse a reply; one without `x-status`, from a worker that does not set it, counts as `ok`."""
        code = headers.get(CODE_HEADER)
        retry_after = headers.get(RETRY_AFTER_HEADER)
        status = decode_text(headers.get(STATUS_HEADER)) or Status.OK
        known = {STATUS_HEADER, CODE_HEADER, DETAIL_HEADER, WORKER_ID_HEADER, RETRY_AFTER_HEADER, PROGRESS_HEADER}
        if status == REFERENCE_ERROR:  # a pool with `requests.statuses: reference`, or the reference's own worker
            status = decode_text(headers.get(FULL_STATUS_HEADER)) or status
            known.add(FULL_STATUS_HEADER)
        return cls(
            status=status,
            body=body,
            content_type=content_type,
            code=code if isinstance(code, int) and not isinstance(code, bool) else None,
            detail=decode_text(headers.get(DETAIL_HEADER)),
            worker_id=decode_text(headers.get(WORKER_ID_HEADER)),
            retry_after=float(retry_after) if isinstance(retry_after, int | float) else None,
            progress=headers.get(PROGRESS_HEADER) is True,
            headers={name: value for name, value in headers.items() if name not in known},
        )


def request_from_wire(
    *,
    key: str,
    body: bytes,
    headers: Mapping[str, object],
    correlation_id: str | None,
    reply_to: str | None,
    content_type: str | None,
    content_encoding: str | None,
    expiration: object,
    timestamp: datetime | None,
    redelivered: bool,
    now_ms: int,
    skew_ms: int = 0,
) -> Request:
    """Parse a request from the fields of a delivery; never raises. `skew_ms`: by how much the clock that has set its
    deadline may be behind this one.

    In a request that the controller has forwarded, `expiration` counts from the forward and `timestamp` is that of the
    caller.
    """
    carries_deadline = HOPS_HEADER in headers and deadlines.DEADLINE_HEADER in headers
    return Request(
        key=key,
        body=body,
        path=decode_text(headers.get(PATH_HEADER)) or "",
        correlation_id=correlation_id,
        reply_to=reply_to or None,
        content_type=content_type,
        content_encoding=content_encoding,
        deadline_ms=deadlines.deadline_ms(
            headers=headers,
            expiration=expiration,
            timestamp=timestamp,
            first_seen_ms=now_ms,
            forwarded=carries_deadline,
            skew_ms=skew_ms,
        ),
        headers=headers,
        redelivered=redelivered,
    )

"""Activity reports of workers, and the fingerprints of requests in them.

Source: docs/reference/protocol/reports.md, "Activity reports". Reports may be lost; the protection of requests does not
depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from osrdyne.protocol.messages import header_text
from osrdyne.protocol.statuses import decode_text

EVENT_HEADER = "x-event"
COMPLETED_ROUTE_HEADER = "x-route"
COMPLETED_PRIORITY_HEADER = "x-priority"
COMPLETED_CODE_HEADER = "x-code"
"""Of `request-completed` reports: the code of the handler, if it differs from the default of the status."""
COMPLETED_PROBE_HEADER = "x-probe"
"""Of `request-completed` reports: the id of the `probe` message for which the worker took the request."""
EMPTY_PROBE_FIELD = "empty_probe"
"""Of reports of state: the id of a `probe` message for which no request was waiting."""
MAX_PROBE_ID = 64
"""Characters of the id of a probe."""
OUTCOMES_FIELD = "outcomes"
"""Of `request-completed` reports in managed pools: the fingerprints of the requests with this outcome."""
MAX_OUTCOMES = 1000
"""How many of them a report names at most: the latest ones."""
RETRIED = "retried"
"""The status of an attempt after which the request is tried again."""
REPLY_TO_REFUSED = "reply-to-refused"
"""The status of a request that was not run, because no answer may go to its reply address."""
COMPLETED_WITHOUT_ANSWER = frozenset({"abandoned", RETRIED, REPLY_TO_REFUSED})
"""Values of `x-status` in reports, besides the statuses of answers."""
WORKER_ID_HEADER = "x-worker-id"
GENERATION_FIELD = "generation"
"""Of reports of the worker's state: the generation of the last control message that it accepted."""
FORGED_FIELD = "forged"
"""The number of forged control messages that the worker has dropped since the last report with this field."""
BUSY_INTERVAL = 5.0
"""Seconds between two `busy` reports while requests run."""
HASHED_BODY_BYTES = 4096
"""A fingerprint uses only the beginning of a body and its length, so that it takes microseconds for every body."""
REQUESTS_FIELD = "requests"
"""The fingerprints of running requests."""
WAITING_FIELD = "waiting"
"""The fingerprints of requests in the worker that have not begun to run."""
RETURNED_FIELD = "returned"
"""The fingerprints of requests that have returned to their queue since the last report with this field, and that
RabbitMQ has counted as failed, although they had not run, or a pause, drain or stop made the worker return them."""
SUSPECTS_FIELD = "suspects"
"""How many requests a worker has put aside because they may have ended an earlier worker."""
ALONE_FIELD = "alone"
"""The text fingerprint of the suspect that runs now, alone in the worker."""
STUCK_FIELD = "stuck"
"""The text fingerprint of a request whose handler did not end when it was cancelled: the worker ends because of it."""
BLOCKED_FIELD = "blocked"
"""Of `failed` reports: the text fingerprint of the request whose handler has blocked the event loop."""
WAITING_FOR_FIELD = "waiting_for"
"""Of `started` reports: the resource that the start of the worker waits for, such as `EXECUTORS`."""
EXECUTORS = "executors"
STARVED_JOBS_FIELD = "jobs_without_executors"
"""Of `busy` reports: the number of jobs that run on a cluster, if none of them has an executor."""
COLD_START_FIELD = "cold_start"
"""Of `ready` reports, and of reports of the worker's state: the milliseconds of each part of the start
(`COLD_START_PARTS`)."""
WAITING_ANSWERS_FIELD = "waiting_answers"
"""Of every report while answers of the worker wait: `{reason: number}` (`WAITING_REASONS`)."""
FULL_QUEUE, NO_PERMISSION = "full", "refused"
WAITING_REASONS = (FULL_QUEUE, NO_PERMISSION)
"""Why an answer waits: its reply queue is full, or RabbitMQ refuses the user."""
EXECUTOR_SECONDS_FIELD = "executor_seconds"
"""Of `ready`, `busy` and state reports: the time of the worker's tasks since its start, in seconds on one core."""
RELOADS_FIELD = "reloads"
"""Of reports of the worker's state: `{id: error}` of the last reloads that the controller has requested; the error is
null if the reload succeeded."""
MAX_WAITING_ANSWERS = 1_000_000
MAX_RELOADS = 4
MAX_RELOAD_ID = 64
FIRST_REQUEST_FIELD = "first_request_ms"
"""Of the first `request-completed` report: the duration of the worker's first request."""
FIRST_REQUEST_PART = "first_query"
COLD_START_PARTS = ("process", "python", "jvm", "session", "load", FIRST_REQUEST_PART)
PROCESS_START_PARTS = ("process", "python", "connection", "jvm", "session", "warm_up", "ready")
"""The parts of the start of a pooled process. `connection` is concurrent with the others; `ready` is the whole start,
from the creation of the process."""
MAX_START_MS = 86_400_000
MAX_EXECUTOR_SECONDS = 1e12
MAX_NAMED_REQUESTS = 64
"""How many requests a report names at most."""


class Event(StrEnum):
    STARTED = "started"
    READY = "ready"
    REQUEST_RECEIVED = "request-received"
    REQUEST_COMPLETED = "request-completed"
    BUSY = "busy"
    IDLE = "idle"
    STOPPING = "stopping"
    FAILED = "failed"
    PROCESS_STATE = "process-state"
    """The state of a pooled worker process (`protocol.pooled`)."""


@dataclass(frozen=True, slots=True)
class ActivityReport:
    """One report. `details` is the JSON body: `in_flight`, `jobs`, `tasks_done`, `tasks_total`, `reason`, `count`, …"""

    key: str
    event: Event
    worker_id: str
    details: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, object] = field(default_factory=dict)

    def wire_headers(self) -> dict[str, object]:
        return {**self.headers, EVENT_HEADER: str(self.event), WORKER_ID_HEADER: self.worker_id}

    def wire_body(self) -> bytes:
        return json.dumps(self.details, separators=(",", ":")).encode() if self.details else b""


def is_of_state(report: ActivityReport) -> bool:
    """Whether the report is about the worker's state, for example for a new leader, and not about an event."""
    return GENERATION_FIELD in report.details


def waiting_answers_of(report: ActivityReport) -> dict[str, int]:
    """How many answers of the worker wait, by reason, without invalid numbers."""
    found = report.details.get(WAITING_ANSWERS_FIELD)
    if not isinstance(found, dict):
        return {}
    counts = {reason: found.get(reason) for reason in WAITING_REASONS}
    return {
        reason: count for reason, count in counts.items() if isinstance(count, int) and 0 < count <= MAX_WAITING_ANSWERS
    }


def reloads_of(report: ActivityReport) -> dict[str, str | None]:
    """The outcomes of reloads in a report, by id, without invalid ones."""
    found = report.details.get(RELOADS_FIELD)
    if not isinstance(found, dict) or len(found) > MAX_RELOADS:
        return {}
    return {
        one: None if error is None else header_text(error)
        for one, error in found.items()
        if len(one) <= MAX_RELOAD_ID and (error is None or isinstance(error, str))
    }


def cold_start_of(report: ActivityReport, *, known: Sequence[str] = COLD_START_PARTS) -> dict[str, int]:
    """The `known` parts of a cold start in a report, in milliseconds, without invalid ones."""
    parts = report.details.get(COLD_START_FIELD)
    stated = report.event is Event.READY or (report.event is Event.BUSY and is_of_state(report))
    found = dict(parts) if isinstance(parts, dict) and stated else {}
    if report.event is Event.REQUEST_COMPLETED:
        found = {FIRST_REQUEST_PART: report.details.get(FIRST_REQUEST_FIELD)}
    return {
        part: found[part]
        for part in known
        if isinstance(found.get(part), int) and not isinstance(found[part], bool) and 0 <= found[part] <= MAX_START_MS
    }


def executor_seconds_of(report: ActivityReport) -> float | None:
    """The time of the worker's tasks in a report; None if it is missing or invalid."""
    seconds = report.details.get(EXECUTOR_SECONDS_FIELD)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_EXECUTOR_SECONDS:
        return None
    return float(seconds)


def report_from_wire(*, routing_key: str, headers: Mapping[str, object], body: bytes) -> ActivityReport | None:
    """Parse a report; None if its event is unknown. The caller counts and drops such a message.

    `worker_id` is empty if the message has none: the reference's protocol does not require it.
    """
    event = decode_text(headers.get(EVENT_HEADER))
    worker_id = decode_text(headers.get(WORKER_ID_HEADER)) or ""
    if event not in list(Event):
        return None
    details: Mapping[str, object] = {}
    if body:
        try:
            decoded = json.loads(body)
        except (ValueError, RecursionError):
            decoded = None
        if isinstance(decoded, dict):
            details = decoded
    rest = {name: value for name, value in headers.items() if name not in {EVENT_HEADER, WORKER_ID_HEADER}}
    return ActivityReport(routing_key, Event(event), worker_id, details, rest)


def fingerprint(
    *, key: str, path: str, correlation_id: str | None, reply_to: str | None, message_id: str | None, body: bytes
) -> str:
    """Identify a request by 16 hexadecimal digits, in reports and in the evidence of the poison inventory.

    Computed from fields that no hop changes, without revealing them. Requests that are equal in all of these fields
    have the same fingerprint.
    """
    digest = blake2b(digest_size=8)
    for part in (key, path, correlation_id, reply_to, message_id):
        raw = b"-" if part is None else b"+" + part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(raw) + raw)
    digest.update(b"%d:" % len(body) + body[:HASHED_BODY_BYTES])
    return digest.hexdigest()


def text_fingerprint(path: str, body: bytes) -> str:
    """Identify the text of a request, independent of its caller, by its path and whole body: 16 hexadecimal digits."""
    raw = path.encode("utf-8", "surrogateescape")
    return blake2b(b"%d:" % len(raw) + raw + body, digest_size=8).hexdigest()


def outcomes_of(report: ActivityReport) -> tuple[str, ...]:
    """The fingerprints of completed requests in a report, without invalid ones."""
    found = report.details.get(OUTCOMES_FIELD)
    if report.event is not Event.REQUEST_COMPLETED or not isinstance(found, list):
        return ()
    return tuple(one for one in found[:MAX_OUTCOMES] if isinstance(one, str) and len(one) <= 64)


def named_requests(details: object) -> tuple[str, ...]:
    """The fingerprints in a field of a report, without invalid ones."""
    if not isinstance(details, list):
        return ()
    return tuple(one for one in details[:MAX_NAMED_REQUESTS] if isinstance(one, str) and len(one) <= 64)

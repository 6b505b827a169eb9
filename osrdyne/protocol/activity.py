"""Activity reports: what workers tell the controller. Source: docs/reference/protocol/reports.md, "Activity reports".

Reports may be lost: nothing that protects a request rests on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from osrdyne.protocol.statuses import decode_text

EVENT_HEADER = "x-event"
COMPLETED_ROUTE_HEADER = "x-route"
COMPLETED_PRIORITY_HEADER = "x-priority"
RETRIED = "retried"
"""The status of an attempt after which the request is tried again."""
REPLY_TO_REFUSED = "reply-to-refused"
"""The status of a request that was not run, because no answer may go to its reply address."""
COMPLETED_WITHOUT_ANSWER = frozenset({"abandoned", RETRIED, REPLY_TO_REFUSED})
"""What `x-status` of a report may say besides the statuses of answers."""
WORKER_ID_HEADER = "x-worker-id"
GENERATION_FIELD = "generation"
"""Detail of a report about the worker's state: the generation of the last control message that it believed."""
FORGED_FIELD = "forged"
"""Detail of a report: how many forged control messages the worker has dropped since it last said so."""
BUSY_INTERVAL = 5.0
"""Seconds between two `busy` reports while anything runs."""


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


def report_from_wire(*, routing_key: str, headers: Mapping[str, object], body: bytes) -> ActivityReport | None:
    """Read a report; None when it is none of a known event (it is then counted and dropped).

    `worker_id` is empty where the message has none: the reference's protocol does not require it.
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

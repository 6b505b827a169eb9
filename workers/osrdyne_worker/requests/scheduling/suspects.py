"""Suspects: requests that may have killed a worker; and refused texts, which have killed workers.

A request that returns with a failed delivery may be the cause of the death of its last worker. It is set aside, runs
last and alone, and is not run again if that kills this worker as well. The workers of the pool then refuse its text
(path and body) for a while.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from osrdyne.aio.clock import Clock
from osrdyne.protocol.activity import ALONE_FIELD, STUCK_FIELD, SUSPECTS_FIELD, text_fingerprint
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.statuses import Status

SUSPECT_PRIORITY = 1_000_000
"""Below every priority level."""
PATIENCE = 60.0
"""Seconds after which a suspect runs although others wait: a harmless one must not expire under steady load."""
VERDICT_TIME = 3.0
"""Seconds that a suspect with two failed deliveries waits at least. RabbitMQ delivers it to another worker of the group
before the controller has noticed the death of the last one."""
ALONE_TIMEOUT = 5.0
"""Seconds to wait until all other requests have left the worker."""
MAX_TEXTS = 1000


class SuspectGate:
    """Allows one suspect at a time in a process that several workers share: if the process ends, only the suspect that
    ran may be the cause."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def one_at_a_time(self, *, patience: float = PATIENCE) -> AsyncIterator[None]:
        """Hold the gate during the block. After `patience` seconds the block runs without the gate: a harmless suspect
        must not expire."""
        try:
            async with asyncio.timeout(patience):
                await self._lock.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._lock.release()


def is_suspect(request: Request) -> bool:
    """Whether a worker may have died because of it. RabbitMQ before 4.3 also counts requests that were requeued; the
    controller has counted before it put a request back."""
    return (request.redelivered and request.delivery_count > 0) or request.put_backs > 0


@dataclass(slots=True)
class DeathEvidence:
    """The facts about requests that may end this worker. Reports contain them for the controller."""

    alone: str = ""
    """Text fingerprint of the suspect that runs alone now."""
    lost_session_alone: str = ""
    """Text fingerprint of the suspect that ran alone when the session was lost."""
    lost_session: list[str] = field(default_factory=list)
    """Fingerprints of the requests that ran when the session was lost."""
    stuck: str = ""
    """Text fingerprint of the request whose handler did not end, which is why this worker exits."""

    def fields(self, *, suspects: int) -> Mapping[str, object]:
        """The fields of a report; `suspects`: how many are in the worker."""
        found: dict[str, object] = {
            SUSPECTS_FIELD: suspects,
            ALONE_FIELD: self.lost_session_alone or self.alone,
            STUCK_FIELD: self.stuck,
        }
        return {name: value for name, value in found.items() if value}


class RefusedTexts:
    """The texts that this worker refuses, each for a limited time."""

    def __init__(self, clock: Clock, texts: Mapping[str, float] | None = None) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self.add(texts or {})

    def add(self, texts: object) -> None:
        """Add `{fingerprint: seconds}` of a control message; invalid entries are ignored."""
        if not isinstance(texts, Mapping):
            return
        now = self._clock.monotonic()
        self._until = {text: until for text, until in self._until.items() if until > now}
        for text, seconds in texts.items():
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if isinstance(text, str) and number and 0 < seconds < math.inf and len(self._until) < MAX_TEXTS:
                self._until[text] = now + seconds

    def seconds_left(self, request: Request) -> float:
        """For how long the text of `request` is refused; 0 if it is not."""
        if not self._until:
            return 0.0
        until = self._until.get(text_fingerprint(request.path, request.body), 0.0)
        return max(0.0, until - self._clock.monotonic())


def refusal(request: Request, seconds: float) -> Response:
    """The answer to a request whose text is refused."""
    message = (
        "Requests with the same path and body have ended two workers that ran them. "
        f"They are refused for another {math.ceil(seconds)} s."
    )
    body = {"error": {"code": "poison", "message": message, "path": request.path[:200]}}
    return Response(
        Status.POISON,
        body=json.dumps(body).encode(),
        content_type="application/json",
        detail=message,
        retry_after=float(math.ceil(seconds)),
    )

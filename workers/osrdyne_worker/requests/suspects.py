"""Requests that may have killed a worker, and texts that certainly have.

A request that comes back with a failed delivery may be why its last worker died: it is put aside, runs last and alone,
and not again when that kills this worker, too. The controller then has its text (path and body) refused for a while.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from osrdyne.aio.clock import Clock
from osrdyne.protocol.fingerprints import text_fingerprint
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.statuses import Status

SUSPECT_RANK = 1_000_000
"""Below every priority level."""
PATIENCE = 60.0
"""Seconds after which a suspect runs although others wait: an innocent one must not expire under steady load."""
VERDICT_TIME = 3.0
"""Seconds that a suspect with two failed deliveries stays aside at least. RabbitMQ gives it to another worker of the
group sooner than the controller notices the death of the first."""
ALONE_TIMEOUT = 5.0
"""Seconds to wait until all others have left the worker."""
MAX_TEXTS = 1000


def is_suspect(request: Request) -> bool:
    """Whether a worker may have died of it. RabbitMQ before 4.3 also counts requests that were given back."""
    return request.redelivered and request.delivery_count > 0


class PoisonTexts:
    """The texts that this worker refuses, each until its time is over."""

    def __init__(self, clock: Clock, texts: Mapping[str, float] | None = None) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self.add(texts or {})

    def add(self, texts: object) -> None:
        """Take over `{fingerprint: seconds}` of a control message; anything else is left out."""
        if not isinstance(texts, Mapping):
            return
        now = self._clock.monotonic()
        self._until = {text: until for text, until in self._until.items() if until > now}
        for text, seconds in texts.items():
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if isinstance(text, str) and number and 0 < seconds < math.inf and len(self._until) < MAX_TEXTS:
                self._until[text] = now + seconds

    def seconds_left(self, request: Request) -> float:
        """How long the request's text is refused; 0: it is not."""
        if not self._until:
            return 0.0
        until = self._until.get(text_fingerprint(request.path, request.body), 0.0)
        return max(0.0, until - self._clock.monotonic())


def refusal(request: Request, seconds: float) -> Response:
    """The answer to a request whose text has killed workers."""
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

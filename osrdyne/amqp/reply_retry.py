"""How often a reply is published to a reply queue that refuses it. The same for controller and workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock
from osrdyne.errors import QueueFullError

PUBLISH_ATTEMPTS = 4
REFUSED = Backoff(initial=0.1, factor=4.0, maximum=2.0)
"""About two seconds in all: a caller that reads its queue has made room by then."""


async def publish_reply(publish: Callable[[], Awaitable[None]], *, clock: Clock) -> None:
    """Publish a reply with `publish`, and again when its queue is full.

    Raises what `publish` raises: `QueueFullError` after the last attempt, any other error at once. A reply to a direct
    reply-to address has waited for its connection by then (`direct_reply_to`).
    """
    for attempt in range(1, PUBLISH_ATTEMPTS):
        try:
            return await publish()
        except QueueFullError:
            await clock.sleep(REFUSED.delay(attempt))
    await publish()

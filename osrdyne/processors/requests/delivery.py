"""Tries to get one request into its queue until it is taken, or refused for good. Used by orphan processor and ingress.

What is refused for good becomes the answer of its caller. What may still come right is tried again with back-off, until
its deadline has passed: the request stays unacknowledged meanwhile, so that a crash brings it back (lifecycle:
"Activation and forwarding").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock
from osrdyne.errors import (
    BrokerConflictError,
    BrokerSilentError,
    MessageTooLargeError,
    PublishRefusedError,
    QueueFullError,
)
from osrdyne.logs import Logger
from osrdyne.processors.requests.forwarding import Refusal
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

FORWARD_RETRY = Backoff(initial=0.2, maximum=5.0)
UNCONFIRMED_RETRY = Backoff(initial=5.0, maximum=120.0)
"""After a publish without a confirm; each try may become one more copy of the request."""

NOT_BOUND = Refusal(Status.EXPIRED, "The time of the request was over before its queue could be had.")


async def deliver(
    attempt: Callable[[], Awaitable[None]], *, key: Key, is_late: Callable[[], bool], clock: Clock, log: Logger
) -> Refusal | None:
    """Repeat `attempt`, which waits for the binding and publishes. None: taken; else why it never will be.

    `is_late`: whether the time of the request has run out, while it was published again and again or, when `attempt`
    raises `TimeoutError`, before there was a queue. Then its caller is told so; it may be in a queue all the same.
    """
    failures = 0
    while True:
        if failures and is_late():
            return Refusal(Status.EXPIRED, "The time of the request was over before a queue had confirmed it.")
        try:
            await attempt()
            return None
        except TimeoutError:
            return NOT_BOUND
        except QueueFullError:
            detail = "The request queue of this key takes nothing: it is full, or has lost its leader. Try again later."
            return Refusal(Status.MAXLEN, detail)
        except MessageTooLargeError as error:
            return Refusal(Status.INVALID, str(error))
        except BrokerConflictError as error:
            return Refusal(Status.START_FAILED, str(error))
        except PublishRefusedError as error:
            # Unroutable although the alternate exchange should catch it: its queue is missing. Keep the request.
            failures += 1
            log.error("request not taken by any queue, trying again", key=key, error=str(error))
            await clock.sleep(FORWARD_RETRY.delay(failures))
        except BrokerSilentError as error:
            # A queue that has lost its leader confirms nothing. That is this key's trouble alone, and other keys go on.
            # Nobody knows whether the request is in the queue.
            failures += 1
            log.error("request not confirmed, trying again", key=key, error=str(error))
            await clock.sleep(UNCONFIRMED_RETRY.delay(failures))

"""Stay connected to RabbitMQ: connect again after each loss, and give up when the log-in is refused for too long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.errors import BrokerAccessError, BrokerError, ConfigurationError
from osrdyne.logs import get_logger
from osrdyne_worker.runtime.exit import AccessRefused, ExitReason, InvalidConfiguration

RECONNECT = Backoff(initial=0.2, maximum=4.0, jitter=0.3)
STABLE_AFTER = 10.0
"""Seconds after which a connection counts as good: its loss is then a first failure again."""

log = get_logger("worker")


async def stay_connected(
    serve: Callable[[], Awaitable[None]],
    *,
    clock: Clock,
    refused_timeout: float,
    request_exit: Callable[[ExitReason], None],
    is_exiting: Callable[[], bool],
) -> None:
    """Call `serve`, which connects and raises `BrokerError` when the connection is lost, again and again.

    Requests an exit if the URI is invalid, or if RabbitMQ has refused the log-in for `refused_timeout` seconds: the
    next worker may get other credentials.
    """
    failures, refused_since = 0, None
    while True:
        since = clock.monotonic()
        try:
            await serve()
        except ConfigurationError as error:
            # A further attempt would fail the same way: the URI of this worker does not change.
            request_exit(InvalidConfiguration(f"WORKER_AMQP_URI: {error.message}"))
        except BrokerError as error:
            failures = 1 if clock.monotonic() - since > STABLE_AFTER else failures + 1
            if not is_exiting():
                log.warning("no connection to RabbitMQ", reason=error.message, failures=failures)
            # Counted from the first refusal in a row: one that is followed by a connection was only temporary.
            refused_since = (refused_since or since) if isinstance(error, BrokerAccessError) else None
            if refused_since is not None and (refused_for := clock.monotonic() - refused_since) >= refused_timeout:
                reason = f"RabbitMQ has refused the log-in for {refused_for:.0f} s: {error.message}"
                request_exit(AccessRefused(reason))
        await clock.sleep(RECONNECT.delay(failures))

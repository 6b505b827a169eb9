"""Restart back-off of one group: failures in a row, delays, and when a failed start counts as final. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from osrdyne.aio.clock import Backoff
from osrdyne.pool.state.observed import StartFailure
from osrdyne.protocol.names import Key
from osrdyne.protocol.refusals import KeyRefusal

RESTART = Backoff(initial=1.0, maximum=60.0)  # Between the end of a worker and the start of the next.
# After a final start failure, until a request may cause the next attempt.
RETRY_FAILED = Backoff(initial=10.0, maximum=300.0)
# Number of workers in a row that ended while running requests, before they completed any, until the group backs off
# anyway; and that ended with a process of other keys before they were ready, until the start has failed.
FREE_RESTARTS = 10
STABLE_AFTER = 60.0  # Seconds of service after which earlier failures no longer count.


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """The start history of one group. `failures`: workers in a row that ended before they were ready; `crashes`:
    workers in a row that ended soon after; `blamed`: workers in a row that ended while they had requests and had
    completed none, or with a process of other keys before they were ready. `rounds`: final failures in a row. Times are
    monotonic."""

    failures: int = 0
    crashes: int = 0
    blamed: int = 0
    rounds: int = 0
    back_off_until: float | None = None
    failure: StartFailure | None = None


def worker_ended(
    record: RestartBackoff,
    *,
    served: bool,
    lived: float,
    reason: str,
    log_lines: tuple[str, ...],
    attempts_allowed: int,
    now: float,
    had_requests: bool = False,
    had_completed: bool = False,
    with_others: bool = False,
) -> RestartBackoff:
    """A worker of a desired group ended by itself, or was stopped because it did not become ready.

    A worker that had requests is replaced at once: its successor runs those last, one at a time, and other requests
    must not wait for them. `with_others`: it ended with a process in which other keys were. That says little about this
    key; the driver gives it its own process if it happens again.
    """
    if not served and with_others and record.blamed + 1 < FREE_RESTARTS:
        return replace(record, blamed=record.blamed + 1, back_off_until=now)
    if served and had_requests:
        blamed = 1 if had_completed or lived >= STABLE_AFTER else record.blamed + 1
        excess = blamed - FREE_RESTARTS
        return RestartBackoff(blamed=blamed, back_off_until=now + RESTART.delay(excess) if excess > 0 else now)
    if served:
        crashes = 1 if lived >= STABLE_AFTER else record.crashes + 1
        # The first crash has no delay; a crash loop backs off.
        until = now if crashes == 1 else now + RESTART.delay(crashes - 1)
        return RestartBackoff(crashes=crashes, blamed=record.blamed, back_off_until=until)
    failures = record.failures + 1
    if failures < attempts_allowed:
        return replace(record, failures=failures, back_off_until=now + RESTART.delay(failures))
    return start_refused(record, reason=reason, log_lines=log_lines, attempts=failures, now=now)


def start_refused(
    record: RestartBackoff, *, reason: str, log_lines: tuple[str, ...], attempts: int, now: float
) -> RestartBackoff:
    """The start failed permanently: requests are answered with the failure until one arrives after the back-off."""
    rounds = record.rounds + 1
    failure = StartFailure(reason, log_lines, attempts, retry_at=now + RETRY_FAILED.delay(rounds))
    return RestartBackoff(rounds=rounds, failure=failure)


def key_refused(record: RestartBackoff, refusal: KeyRefusal, *, refused_time: float, now: float) -> RestartBackoff:
    """The key is refused: its requests are answered with the refusal for `refused_time`. An error that is not of the
    key, such as a store that does not answer, may pass sooner."""
    rounds = record.rounds + 1
    pause = refused_time if refusal.is_of_key else RETRY_FAILED.delay(rounds)
    return RestartBackoff(rounds=rounds, failure=StartFailure(refusal.message, (), 1, now + pause, refusal))


def retry_allowed(record: RestartBackoff) -> RestartBackoff:
    """A request arrived after the back-off: try again, with the full number of attempts."""
    return replace(record, failures=0, back_off_until=None, failure=None)


def became_ready(record: RestartBackoff) -> RestartBackoff:
    """A worker serves: failed starts are cleared. Crashes are not; only a worker that lasts clears them."""
    return RestartBackoff(crashes=record.crashes, blamed=record.blamed, back_off_until=record.back_off_until)


def has_suspects(record: RestartBackoff) -> RestartBackoff:
    """A worker received requests that its predecessor had been running: a request may have ended that one."""
    return replace(record, crashes=0)


class RestartBackoffs:
    """The restart back-off of every group of a term. A group without history has a clean one."""

    def __init__(self) -> None:
        self._records: dict[Key, RestartBackoff] = {}

    def __getitem__(self, key: Key) -> RestartBackoff:
        return self._records.get(key, _CLEAN)

    def apply(self, key: Key, change: Callable[[RestartBackoff], RestartBackoff]) -> None:
        """Replace the back-off of `key` by the result of `change`."""
        record = change(self[key])
        if record == _CLEAN:
            self._records.pop(key, None)
        else:
            self._records[key] = record

    def clear(self, key: Key) -> None:
        self._records.pop(key, None)


_CLEAN = RestartBackoff()

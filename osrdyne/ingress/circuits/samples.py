"""The samples of one circuit: which requests succeeded and failed lately, each counted once. Pure.

Times are milliseconds since the epoch, so that samples survive a change of leader.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from osrdyne.protocol.activity import COMPLETED_WITHOUT_ANSWER, RETRIED
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import CODES, Status

CONFLICT = 409  # The backend works: it has refused this request, and would refuse it again.
# The pool answered these itself, or the client ended the request: no outcome of the backend of a route.
_WITHOUT_OUTCOME = frozenset(
    {
        Status.EXPIRED,
        Status.CANCELLED,
        Status.INVALID,
        Status.NO_ROUTE,
        Status.CAPACITY,
        Status.NOT_RUNNING,
        Status.MAXLEN,
        Status.UNAUTHORIZED,
        Status.FORBIDDEN,
        Status.TOO_LARGE,
        Status.QUEUE_FULL,
        Status.GONE,
        Status.CIRCUIT_OPEN,
        *(COMPLETED_WITHOUT_ANSWER - {RETRIED}),
    }
)


def succeeded(status: str, code: int | None) -> bool | None:
    """Whether a request with this outcome counts as successful; None if it counts as neither.

    `code`: the code of the handler, None for the default one of the status. A retried attempt has failed.
    """
    if status in _WITHOUT_OUTCOME:
        return None
    if code is None:
        code = CODES.get(Status(status)) if status in list(Status) else None
    return status != RETRIED and code is not None and (200 <= code < 300 or code == CONFLICT)


@dataclass(frozen=True, slots=True)
class Sample:
    """The latest outcome of one request, and the group that had it."""

    key: Key
    at_ms: int


# By request id, in the order of their times. Not a dict: to remove its first keys again and again is slow.
Side = OrderedDict[str, Sample]


@dataclass(slots=True)
class Samples:
    """Successful and failed requests by their id. An id is on one side only: its latest outcome counts."""

    successes: Side = field(default_factory=OrderedDict)
    failures: Side = field(default_factory=OrderedDict)

    def record(self, request_id: str, sample: Sample, *, success: bool, most: int) -> None:
        """Count an outcome; of each side, the latest `most` samples stay."""
        # Removed first: an existing id would keep its place, and the sides must stay in the order of time.
        self.successes.pop(request_id, None)
        self.failures.pop(request_id, None)
        side = self.successes if success else self.failures
        side[request_id] = sample
        self.bound(most)

    def bound(self, most: int) -> None:
        """Drop the oldest samples of each side beyond `most`."""
        for side in (self.successes, self.failures):
            while len(side) > most:
                side.popitem(last=False)

    def drop_older(self, *, now_ms: int, max_age_ms: int) -> None:
        """Drop the samples that have reached `max_age_ms`."""
        for side in (self.successes, self.failures):
            # The sides are in the order of time, so the first sample that is young enough ends the loop.
            while side and now_ms - next(iter(side.values())).at_ms >= max_age_ms:
                side.popitem(last=False)

    def clamp(self, now_ms: int) -> None:
        """Move samples from the future to now: the clock was set back."""
        for side in (self.successes, self.failures):
            side.update([(one, Sample(found.key, now_ms)) for one, found in side.items() if found.at_ms > now_ms])

    @property
    def count(self) -> int:
        return len(self.successes) + len(self.failures)

    @property
    def fail_ratio(self) -> int:
        """The percentage of failed requests, rounded down; 0 without samples."""
        return 100 * len(self.failures) // self.count if self.count else 0

    def groups(self) -> Iterator[Key]:
        """The groups of the samples, each once, the one with the earliest sample first."""
        ones = sorted((*self.failures.values(), *self.successes.values()), key=lambda one: one.at_ms)
        return iter(dict.fromkeys(one.key for one in ones))

    def clear(self) -> None:
        self.successes.clear()
        self.failures.clear()

"""The answer to callers of a group that cannot start."""

from __future__ import annotations

from osrdyne.pool.state.observed import StartFailure
from osrdyne.processors.failures.start_failures import describe_failure

EXIT = "the worker ended with exit code 3"
SAID = "The worker ended with exit code 3"


def describe(reason: str, *log_lines: str) -> str:
    return describe_failure(StartFailure(reason, log_lines, attempts=1, retry_at=0.0))


def test_worker_that_gave_no_reason_is_quoted() -> None:
    description = describe(EXIT, "first", "cannot open the data")
    assert description == f"{SAID}. Last log line: cannot open the data"


def test_reason_of_the_worker_is_not_repeated_from_its_log() -> None:
    description = describe(f"{EXIT}: there is no java.", '{"reason": "there is no java.", "level": "error"}')
    assert description == f"{SAID}: there is no java."


def test_worker_that_wrote_nothing_leaves_the_reason() -> None:
    assert describe(EXIT) == f"{SAID}."

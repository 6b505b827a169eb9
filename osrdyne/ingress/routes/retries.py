"""The member `retry` of a route: its format in a document, and its description. Used by `manifest`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from osrdyne.config.types import parse_duration
from osrdyne.protocol.retries import MAX_ATTEMPTS, RetryTerms, is_code

MEMBERS = frozenset({"codes", "max_attempts", "delays"})
MAX_DELAYS = 10
MAX_DIFFERENT_DELAYS = 20  # In one manifest: each of them is a queue.
LEAST_DELAY, LONGEST_DELAY = 0.1, 86_400.0


class Refuse(Protocol):
    """Collects an error: its path, and what is expected there."""

    def __call__(self, path: str, message: str) -> None: ...


def read_retry(members: Mapping[str, Any], path: str, refuse: Refuse) -> RetryTerms | None:
    """The retry terms of one route; None if a member is invalid."""
    codes = _codes(members.get("codes"), f"{path}.codes", refuse)
    attempts = _attempts(members.get("max_attempts"), f"{path}.max_attempts", refuse)
    delays = _delays(members.get("delays"), f"{path}.delays", refuse)
    return RetryTerms(codes, attempts, delays) if codes and attempts and delays else None


def _codes(value: Any, path: str, refuse: Refuse) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not value:
        refuse(path, "a list of codes is expected, such as [503, 5xx]")
        return None
    texts = [str(one).lower() if isinstance(one, int | str) and not isinstance(one, bool) else "" for one in value]
    wrong = [place for place, text in enumerate(texts) if not is_code(text)]
    for place in wrong:
        refuse(f"{path}[{place}]", "a code from 400 to 599, 4xx or 5xx is expected")
    return None if wrong else tuple(dict.fromkeys(texts))


def _attempts(value: Any, path: str, refuse: Refuse) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_ATTEMPTS:
        return value
    refuse(path, f"a whole number from 1 to {MAX_ATTEMPTS} is expected, the first attempt included")
    return None


def _delays(value: Any, path: str, refuse: Refuse) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_DELAYS:
        refuse(path, f"a list of 1 to {MAX_DELAYS} durations is expected, such as [1s, 30s, 5m]")
        return None
    delays = [_delay(one, f"{path}[{place}]", refuse) for place, one in enumerate(value)]
    read = tuple(delay for delay in delays if delay is not None)
    return read if len(read) == len(delays) else None


def _delay(value: Any, path: str, refuse: Refuse) -> int | None:
    """In milliseconds."""
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        refuse(path, str(error))
        return None
    if isinstance(seconds, float) and LEAST_DELAY <= seconds <= LONGEST_DELAY:
        return round(seconds * 1000)
    refuse(path, f"a duration from {LEAST_DELAY} seconds to {LONGEST_DELAY / 3600:.0f} hours is expected")
    return None


def different_delays(terms: Iterable[RetryTerms | None]) -> frozenset[int]:
    """The different delays of these routes, in milliseconds."""
    return frozenset(delay for one in terms if one is not None for delay in one.delays_ms)


def shown_retry(terms: RetryTerms) -> dict[str, Any]:
    """The member in the form of a document."""
    return {
        "codes": [int(code) if code.isdigit() else code for code in terms.codes],
        "max_attempts": terms.max_attempts,
        "delays": [in_seconds(delay) for delay in terms.delays_ms],
    }


def in_seconds(milliseconds: int) -> float:
    """Seconds; whole ones as an integer."""
    return milliseconds // 1000 if milliseconds % 1000 == 0 else milliseconds / 1000


def describe_retry(terms: RetryTerms, *, retrying: Mapping[int, int] | None = None) -> str:
    """The terms in a sentence, with the number of requests that wait for their next attempt, if known."""
    delays = ", then ".join(f"{in_seconds(delay)} s" for delay in terms.delays_ms)
    sentence = f"After {' or '.join(terms.codes)} it is tried again: {terms.max_attempts} times in all, after {delays}."
    known = [delay for delay in sorted(set(terms.delays_ms)) if delay in (retrying or {})]
    if not retrying or not known:
        return sentence
    counts = ", ".join(f"{retrying[delay]} for {in_seconds(delay)} s" for delay in known)
    return f"{sentence} Requests of the pool that wait for a next attempt: {counts}."

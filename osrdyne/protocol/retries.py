"""The terms of retries of a route, and the headers that carry them with a request.

Source: docs/reference/routes/retries.md.

The ingress writes the terms into headers when it accepts a request, so that a later change of the routes does not
affect the request. A worker decides by these headers alone whether a failed request is tried again. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from osrdyne.protocol.names import PRIORITIES
from osrdyne.protocol.statuses import decode_text

TERMS_HEADER = "x-osrdyne-retry"
CLASS_HEADER = "x-osrdyne-class"
"""The priority level to which a request returns: a digit, or `default`."""
DELAY_HEADER = "x-osrdyne-retry-delay"
"""Milliseconds, as text: the wait queue of a request."""
ATTEMPTS_HEADER = "x-osrdyne-attempts"
"""In a request, the number of earlier attempts; in an answer, the number of all attempts if it is more than one."""
OWN_HEADERS = frozenset({TERMS_HEADER, CLASS_HEADER, DELAY_HEADER, ATTEMPTS_HEADER})
"""Headers that only osrdyne sets on a request."""
CALLERS_PREFIX = "x-queue-retry-"
"""A header with this prefix, a code (`400`) or class of codes (`4xx`), and the value 0: no further attempt after such
an outcome (Gateleen queues)."""

MAX_ATTEMPTS = 100
_CODE = re.compile(r"[45](?:xx|[0-9]{2})")
_DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class RetryTerms:
    """`codes` are numbers and classes (`503`, `5xx`). `max_attempts` includes the first attempt. `delays_ms` are the
    delays before the further attempts; the last delay is repeated."""

    codes: tuple[str, ...]
    max_attempts: int
    delays_ms: tuple[int, ...]

    def covers(self, code: int) -> bool:
        """Whether another attempt follows an outcome of this code."""
        return str(code) in self.codes or class_of(code) in self.codes

    def delay_ms(self, attempts: int) -> int:
        """The delay after this number of attempts, at least one."""
        return self.delays_ms[min(attempts, len(self.delays_ms)) - 1]

    def to_header(self) -> str:
        return _to_header(self)


@lru_cache(maxsize=256)
def _to_header(terms: RetryTerms) -> str:
    """Encode the terms; cached, because all requests of a route have the same."""
    members = {"codes": terms.codes, "max_attempts": terms.max_attempts, "delays_ms": terms.delays_ms}
    return json.dumps(members, separators=(",", ":"))


def read_terms(headers: Mapping[str, object]) -> RetryTerms | None:
    """The terms in the headers of a request; None if they are missing or invalid."""
    text = decode_text(headers.get(TERMS_HEADER))
    if text is None:
        return None
    try:
        found = json.loads(text)
        terms = RetryTerms(tuple(found["codes"]), found["max_attempts"], tuple(found["delays_ms"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    delays_fit = all(type(delay) is int and delay > 0 for delay in terms.delays_ms)
    return terms if terms.delays_ms and delays_fit and type(terms.max_attempts) is int else None


def read_attempts(headers: Mapping[str, object]) -> int:
    """The number of earlier attempts of a request."""
    attempts = headers.get(ATTEMPTS_HEADER)
    return attempts if type(attempts) is int and attempts > 0 else 0


def is_code(text: str) -> bool:
    """Whether the text is a code or class of codes of a failure."""
    return _CODE.fullmatch(text) is not None


def class_of(code: int) -> str:
    """The class of a code, such as `5xx` for 503."""
    return f"{code // 100}xx"


def class_name(priority: int | None) -> str:
    """The value of `CLASS_HEADER` for a priority level."""
    return _DEFAULT_CLASS if priority is None else str(priority)


def read_class(headers: Mapping[str, object]) -> int | None:
    """The priority level of a request; the default level if the header is missing or invalid."""
    text = decode_text(headers.get(CLASS_HEADER))
    return next((priority for priority in PRIORITIES if text == str(priority)), None)

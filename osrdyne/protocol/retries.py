"""How failed requests of a route are tried again, and how that travels with a request.

Source: docs/reference/routes/retries.md.

The ingress writes the terms into headers when it accepts a request, so that a later change of the routes does not touch
it; the worker that fails decides by them alone. Pure.
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
"""The priority class that a request comes back to: a digit, or `default`."""
DELAY_HEADER = "x-osrdyne-retry-delay"
"""Milliseconds, as text: which wait queue a request is for."""
ATTEMPTS_HEADER = "x-osrdyne-attempts"
"""In a request, how often it was tried before; in an answer, the total number, if it is more than one."""
OWN_HEADERS = frozenset({TERMS_HEADER, CLASS_HEADER, DELAY_HEADER, ATTEMPTS_HEADER})
"""Headers that only osrdyne sets on a request."""
CALLERS_PREFIX = "x-queue-retry-"
"""With a code (`400`) or class (`4xx`) behind it, and the value 0: no further try after such an outcome (Gateleen
queues)."""

MAX_ATTEMPTS = 100
_CODE = re.compile(r"[45](?:xx|[0-9]{2})")
_DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class RetryTerms:
    """`codes` are numbers and classes (`503`, `5xx`), `max_attempts` counts the first one as well, and `delays_ms` come
    before the further ones, the last of them again and again."""

    codes: tuple[str, ...]
    max_attempts: int
    delays_ms: tuple[int, ...]

    def covers(self, code: int) -> bool:
        """Whether an outcome of this code is worth a further try."""
        return str(code) in self.codes or class_of(code) in self.codes

    def delay_ms(self, attempts: int) -> int:
        """How long to wait after this number of attempts, at least one."""
        return self.delays_ms[min(attempts, len(self.delays_ms)) - 1]

    def to_header(self) -> str:
        return _written(self)


@lru_cache(maxsize=256)
def _written(terms: RetryTerms) -> str:
    """Each request of a route has the same."""
    members = {"codes": terms.codes, "max_attempts": terms.max_attempts, "delays_ms": terms.delays_ms}
    return json.dumps(members, separators=(",", ":"))


def read_terms(headers: Mapping[str, object]) -> RetryTerms | None:
    """The terms that a request carries; None where it carries none, or something else."""
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
    """How often a request was tried before."""
    attempts = headers.get(ATTEMPTS_HEADER)
    return attempts if type(attempts) is int and attempts > 0 else 0


def is_code(text: str) -> bool:
    """Whether it is the code or class of a failure."""
    return _CODE.fullmatch(text) is not None


def class_of(code: int) -> str:
    """`5xx` of 503."""
    return f"{code // 100}xx"


def class_name(priority: int | None) -> str:
    """A priority class as `CLASS_HEADER` has it."""
    return _DEFAULT_CLASS if priority is None else str(priority)


def read_class(headers: Mapping[str, object]) -> int | None:
    """The priority class that a request belongs to; the default class where that is not said."""
    text = decode_text(headers.get(CLASS_HEADER))
    return next((priority for priority in PRIORITIES if text == str(priority)), None)

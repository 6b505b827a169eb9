"""Regular expressions of operators, matched by RE2 in time linear in the text (decision 0022).

The syntax of RE2 has no look-around and no back-references. Used by the splitter and quotas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import re2

from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem

MAX_PATTERN = 1_000  # Characters of one expression.
MAX_MEMORY = 1 << 20  # Bytes that RE2 may use for one expression; a larger program is refused.


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled expression that matches whole texts."""

    text: str
    _compiled: Any

    @property
    def groups(self) -> int:
        """The number of groups that it captures."""
        return int(self._compiled.groups)

    def match(self, text: str) -> tuple[str, ...] | None:
        """The captured groups of a text that matches as a whole, empty for an unused group; None for any other text."""
        try:
            found = self._compiled.fullmatch(text)
        except UnicodeEncodeError:  # surrogates, from bytes that are not UTF-8, match no expression
            return None
        return None if found is None else tuple(group or "" for group in found.groups())


def compile_pattern(text: str, path: str) -> Pattern:
    """Raises `InvalidDocumentError` with the column of the error."""
    if len(text) > MAX_PATTERN:
        raise InvalidDocumentError([Problem(f"an expression has at most {MAX_PATTERN} characters", path=path)])
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_MEMORY
    try:
        return Pattern(text, re2.compile(text, options))
    except UnicodeEncodeError:
        raise InvalidDocumentError([Problem("it is not valid Unicode", path=path)]) from None
    except re2.error as error:
        raise InvalidDocumentError([_problem(error, text, path)]) from None


def _problem(error: re2.error, text: str, path: str) -> Problem:
    """RE2 reports the error and repeats the part of the expression that has it: `missing ): (ab`."""
    reported = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error.args[0])
    reason, _, part = reported.partition(": ")
    place = text.find(part) if part else -1
    return Problem(
        f"{reported}; expressions have the syntax of RE2" if part else reason, place + 1 if place >= 0 else None, path
    )

"""Patterns of keys, such as `tpch/sf={scale}`: the datasets of the SQL pipeline and the profiles of a pool.

A part of a pattern may be a regular expression. The caller chooses the engine: workers use Python's `re`; the
controller uses RE2 (`osrdyne.expressions`), because any caller may choose the keys that it matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_DEFAULT_PART = r"[^/]+?"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class KeyPattern:
    """A pattern such as `tpch/sf={scale}` or `log/{day:\\d{4}-\\d\\d}`, which must match the whole key.

    `{name}` matches the shortest text without `/`, but not `.` or `..`; `{name:regex}` matches the regular expression;
    `{{` and `}}` are braces. `compile` compiles an expression, and raises ValueError or `re.error`. Raises ValueError
    for an invalid pattern.
    """

    def __init__(self, text: str, *, compile: Callable[[str], Any] = re.compile) -> None:
        self.text = text
        self.names: list[str] = []
        self._free: set[str] = set()
        self._compile = compile
        self._regex = compile("".join(self._pieces(text)))

    def match(self, key: str) -> dict[str, str] | None:
        """The parts of `key` by name; None if the pattern does not match."""
        found = self._regex.fullmatch(key)
        if found is None or any(found[name] in (".", "..") for name in self._free):
            return None
        parts: dict[str, str] = found.groupdict()
        return parts

    def _pieces(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            if text[at : at + 2] in ("{{", "}}"):
                yield re.escape(text[at])
                at += 2
            elif text[at] == "{":
                end = _closing_brace(text, at)
                yield self._part(text[at + 1 : end])
                at = end + 1
            elif text[at] == "}":
                raise ValueError(f"a }} without a {{ at character {at + 1}; write }}}} for a brace")
            else:
                yield re.escape(text[at])
                at += 1

    def _part(self, inner: str) -> str:
        name, colon, regex = inner.partition(":")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of a part; use letters, digits and _")
        if name in self.names:
            raise ValueError(f"the part {name!r} is defined twice")
        self.names.append(name)
        if not colon:
            self._free.add(name)
            return f"(?P<{name}>{_DEFAULT_PART})"
        try:
            groups = self._compile(regex).groups
        except (re.error, ValueError) as error:
            raise ValueError(f"the expression of {name!r} is not valid: {error}") from error
        if groups:
            raise ValueError(f"the expression of {name!r} has groups; write (?:...) instead of (...)")
        return f"(?P<{name}>{regex})"


def _closing_brace(text: str, start: int) -> int:
    """The position of the brace that closes the one at `start`; regular expressions may contain pairs (`\\d{4}`)."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"the {{ at character {start + 1} is not closed")

"""Split the text of a condition into tokens, each with its column. Used by `parser` only.

One pass of one regular expression, whose alternatives begin with different characters: the time is linear in the length
of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

# Characters of one condition: far more than a person writes, and a bound of its cost.
MAX_LENGTH = 16_384
MAX_INDEX_DIGITS = 9  # Digits of an array index in a path of the body. Python refuses to convert very long ones.


class Kind(StrEnum):
    """What a token is; keywords are operators."""

    NUMBER = "number"
    STRING = "string"
    NAME = "name"
    SYSTEM = "system"
    HEADER = "header"
    OPERATOR = "operator"
    END = "end"


@dataclass(frozen=True, slots=True)
class Token:
    """`text` as written, keywords in upper case; `column` counts from 1."""

    kind: Kind
    text: str
    column: int


class SyntaxFault(Exception):
    """The text is not a condition. Stays inside this package."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


_TOKEN = re.compile(
    r"""
      (?P<blank>\s+|/\*.*?\*/)
    | (?P<number>0[xX][0-9a-fA-F]+|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<name>[^\W\d]\w*(?:\.\w+)*)
    | (?P<system>\$[^\W\d]\w*(?:\.\w+|\[[0-9]+\])*)
    | (?P<header>\{\s*[^\s${}'"][^{}]*\})
    | (?P<wrong>==|&&)
    | (?P<operator>\|\||\?\?|<=|>=|!=|<>|[=<>+\-*/%(),{}])
    """,
    re.VERBOSE | re.DOTALL,
)
_INSTEAD = {"==": "=", "&&": "AND"}
_KEYWORDS = {"AND", "OR", "NOT"}
_ESCAPE = re.compile(r"\\(?:[uU]([0-9A-Fa-f]{4})|([\"'\\]))")


def tokenize(text: str) -> list[Token]:
    """All tokens of the text and an END. Raises `SyntaxFault`."""
    if len(text) > MAX_LENGTH:
        raise SyntaxFault(f"a condition has at most {MAX_LENGTH} characters", MAX_LENGTH + 1)
    return [*_tokens(text), Token(Kind.END, "", len(text) + 1)]


def _tokens(text: str) -> Iterator[Token]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or (text.startswith("/*", position) and match.lastgroup != "blank"):
            raise _fault(text, position)
        group, word = match.lastgroup or "", match.group()
        column = position + 1
        position = match.end()
        if group == "wrong":
            raise SyntaxFault(f"'{word}' is not an operator: write {_INSTEAD[word]}", column)
        if group == "name" and word.upper() in _KEYWORDS:
            yield Token(Kind.OPERATOR, word.upper(), column)
        elif group != "blank":
            yield Token(Kind(group), word, column)


def _fault(text: str, position: int) -> SyntaxFault:
    symbol = text[position]
    if symbol in "'\"":
        return SyntaxFault("unterminated string", position + 1)
    if text.startswith("/*", position):
        return SyntaxFault("unterminated comment", position + 1)
    return SyntaxFault(f"invalid symbol '{symbol}'", position + 1)


def number_of(literal: str) -> float:
    """The value of a number as written; one that is too large is infinite."""
    if literal[:2] in {"0x", "0X"}:
        try:
            return float(int(literal, 16))
        except OverflowError:
            return float("inf")
    return float(literal)


def string_of(literal: str) -> str:
    r"""The value of a quoted string: `\"`, `\'`, `\\` and `\uXXXX` are escapes, any other backslash is itself."""
    text = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)) if escape[1] else escape[2], literal[1:-1])
    # Two escapes may form a surrogate pair; half of a pair is replaced.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

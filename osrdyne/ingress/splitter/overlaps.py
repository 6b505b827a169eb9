"""Find a text that two regular expressions both match, to warn of rules that overlap. Used by `splitter`. Pure.

An expression is parsed into a small automaton, and the product of two automata is searched for a common text. Flags,
word boundaries and Unicode classes are not supported here; RE2, which matches the keys, supports them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # Code points from and to, both included; in no order.

MAX_STATES = 2_000
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = (*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0A), (0x0C, 0x0D), (0x20, 0x20))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


@dataclass(slots=True)
class SearchBudget:
    """The remaining steps for a manifest, shared by the searches of all pairs of rules."""

    steps: int

    def spend(self) -> None:
        """Count one step. Raises `UnsupportedExpressionError` if none is left."""
        if self.steps <= 0:
            raise UnsupportedExpressionError
        self.steps -= 1


class UnsupportedExpressionError(Exception):
    """The expression uses syntax that only RE2 supports, or it or the search is too large."""


class Automaton:
    """A nondeterministic automaton for an expression, built while the text is parsed (Thompson's construction).

    `free[n]`: the states that follow state n without a character. `steps[n]`: those that follow it after a character
    of the given ranges. `start` and `end`: the first state and the accepting one.
    """

    def __init__(self, text: str) -> None:
        """Raises `UnsupportedExpressionError`. RE2 must have accepted the expression."""
        self.free: list[list[int]] = []
        self.steps: list[list[tuple[Ranges, int]]] = []
        self._text = text
        self._at = 0
        self._accept_mark("^")
        self.start, self.end = self._alternatives()
        if self._at < len(text):
            raise UnsupportedExpressionError

    def _state(self) -> int:
        if len(self.free) == MAX_STATES:
            raise UnsupportedExpressionError
        self.free.append([])
        self.steps.append([])
        return len(self.free) - 1

    # --- parsing: each method returns the first and the last state of the part that it has parsed

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        self._at += 1
        return self._text[self._at - 1 : self._at]

    def _accept_mark(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _alternatives(self) -> tuple[int, int]:
        start, end = self._state(), self._state()
        while True:
            first, last = self._sequence()
            self.free[start].append(first)
            self.free[last].append(end)
            if not self._accept_mark("|"):
                return start, end

    def _sequence(self) -> tuple[int, int]:
        start = last = self._state()
        while self._peek() not in ("", "|", ")"):
            if self._text[self._at :] == "$":
                self._take()
                break
            first, end = self._repeated()
            self.free[last].append(first)
            last = end
        return start, last

    def _repeated(self) -> tuple[int, int]:
        began = self._at
        first, last = self._atom()
        after = self._at
        least, most = self._count()
        ended = self._at
        start = end = self._state()
        for number in range(max(least, 1 if most is None else most)):
            if number:
                self._at = began  # a count such as {2,5} needs copies of the atom: parse it again for each
                first, last = self._atom()
            self.free[end].append(first)
            if number >= least:  # this copy and all after it may be left out
                skip = self._state()
                self.free[end].append(skip)
                self.free[last].append(skip)
                last = skip
            if most is None and number >= least - 1:
                self.free[last].append(first)
            end = last
        self._at = ended if ended > after else after
        return start, end

    def _count(self) -> tuple[int, int | None]:
        """The least and the greatest number of repetitions of the atom before it; None: no limit."""
        least: int = 1
        most: int | None = 1
        if self._accept_mark("*"):
            least, most = 0, None
        elif self._accept_mark("+"):
            least, most = 1, None
        elif self._accept_mark("?"):
            least, most = 0, 1
        elif self._peek() == "{":
            body, found, _ = self._text[self._at + 1 :].partition("}")
            low, comma, high = body.partition(",")
            if not found or not low.isdecimal() or not (high.isdecimal() or not high):
                raise UnsupportedExpressionError
            self._at += len(body) + 2
            least = int(low)
            most = int(high) if high else None if comma else least
        else:
            return least, most
        self._accept_mark("?")
        return least, most

    def _atom(self) -> tuple[int, int]:
        if self._accept_mark("("):
            if self._accept_mark("?") and not self._accept_mark(":"):
                raise UnsupportedExpressionError
            found = self._alternatives()
            if not self._accept_mark(")"):
                raise UnsupportedExpressionError
            return found
        start, end = self._state(), self._state()
        self.steps[start].append((self._characters(), end))
        return start, end

    def _characters(self) -> Ranges:
        character = self._take()
        if character == ".":
            return _all_but(((0x0A, 0x0A),))
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character in "^$":
            raise UnsupportedExpressionError
        return ((ord(character), ord(character)),)

    def _class(self) -> Ranges:
        negated = self._accept_mark("^")
        found: list[tuple[int, int]] = []
        while not (found and self._peek() == "]"):
            if self._text.startswith("[:", self._at) or not self._peek():
                raise UnsupportedExpressionError
            low = self._class_item()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._take()
                found.append((low[0][0], self._class_item()[0][1]))
            else:
                found += low
        self._take()
        return _all_but(tuple(found)) if negated else tuple(found)

    def _class_item(self) -> Ranges:
        character = self._take()
        return self._escape() if character == "\\" else ((ord(character), ord(character)),)

    def _escape(self) -> Ranges:
        name = self._take()
        if name.lower() in _CLASSES:
            return _CLASSES[name] if name.islower() else _all_but(_CLASSES[name.lower()])
        if name.isalnum() and name not in _CONTROLS:
            raise UnsupportedExpressionError
        code = ord(_CONTROLS.get(name, name))
        return ((code, code),)


def common_text(first: Automaton, second: Automaton, budget: SearchBudget) -> str | None:
    """A shortest text that both match; None if there is none.

    Each pair of states costs one step of `budget`. Raises `UnsupportedExpressionError` if none is left.
    """
    begin = (first.start, second.start)
    texts = {begin: ""}
    waiting = deque([begin])
    while waiting:
        here = waiting.popleft()
        if here == (first.end, second.end):
            return texts[here]
        budget.spend()
        for following, character in _steps(first, second, here):
            if following not in texts:
                texts[following] = texts[here] + character
                # Steps without a character come first, so that texts are visited in the order of their length.
                (waiting.append if character else waiting.appendleft)(following)
    return None


def _steps(first: Automaton, second: Automaton, here: tuple[int, int]) -> Iterator[tuple[tuple[int, int], str]]:
    one, other = here
    yield from (((state, other), "") for state in first.free[one])
    yield from (((one, state), "") for state in second.free[other])
    for ranges, state in first.steps[one]:
        for other_ranges, other_state in second.steps[other]:
            character = _common_character(ranges, other_ranges)
            if character is not None:
                yield (state, other_state), character


def _common_character(ranges: Ranges, others: Ranges) -> str | None:
    """A character in both, preferably a printable one."""
    found = [(max(low, other_low), min(high, other_high)) for low, high in ranges for other_low, other_high in others]
    found = [(low, high) for low, high in found if low <= high]
    for wanted in (0x61, 0x41, 0x30, 0x2D):
        if any(low <= wanted <= high for low, high in found):
            return chr(wanted)
    return chr(min((max(low, 0x21) if high >= 0x21 else low) for low, high in found)) if found else None


def _all_but(ranges: Ranges) -> Ranges:
    """All other code points, without surrogates."""
    found, following = [], 0
    for low, high in sorted((*ranges, _SURROGATES)):
        if following < low:
            found.append((following, low - 1))
        following = max(following, high + 1)
    return (*found, (following, _LAST)) if following <= _LAST else tuple(found)

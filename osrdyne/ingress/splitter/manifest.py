"""The splitter manifest: the document of a Gateleen queue splitter, checked as a whole, and its rules.

`load_splitter` reads the text of a user, and `SplitterManifest.document` gives the form that is stored, which loads to
the same rules. One error refuses the whole document, and every error is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from osrdyne.ingress.documents.patterns import Pattern, compile_pattern
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.documents.reader import DocumentReader, Members, read_document, read_json
from osrdyne.ingress.splitter.overlaps import Automaton, SearchBudget, UnsupportedExpressionError, common_text
from osrdyne.ingress.splitter.rules import DEFAULT_DELIMITER, FromHash, FromRequest, FromStatic, Rule

MAX_RULES = 200
MAX_NAMES = 1_000  # Of one static rule, and buckets of a hash: each is a group with workers of its own.
OVERLAP_STEPS = 100_000  # Steps in the search for overlapping rules, all together; some tenths of a second.

_STATIC, _REQUEST, _HASH = "postfixFromStatic", "postfixFromRequest", "postfixFromHash"
_DELIMITER, _DESCRIPTION = "postfixDelimiter", "description"


@dataclass(frozen=True)
class SplitterManifest:
    """Rules in the order of the file: the first that matches a key applies."""

    rules: tuple[Rule, ...] = ()

    @cached_property
    def warnings(self) -> tuple[Problem, ...]:
        """For the author of the manifest. Computed on access, because the search for overlaps takes long."""
        captures_nothing = "the expression captures nothing, so it splits nothing: put a part of it in parentheses"
        useless = [
            Problem(captures_nothing, path=f"{rule.name}.{_REQUEST}.url")
            for rule in self.rules
            if isinstance(rule.postfix, FromRequest) and rule.postfix.adds_nothing
        ]
        return (*useless, *_overlaps(self.rules))

    @property
    def size(self) -> int:
        return len(self.rules)

    def document(self) -> dict[str, Any]:
        """The manifest as JSON values, in the form of Gateleen."""
        return {rule.name: _shown(rule) for rule in self.rules}


def load_splitter(text: str) -> SplitterManifest:
    """Raises `InvalidDocumentError` with every error of the text."""
    return _Reader().read(read_document(text))


def load_splitter_json(text: str) -> SplitterManifest:
    """As `load_splitter`, but of JSON only. Raises `InvalidDocumentError`."""
    return _Reader().read(read_json(text))


class _Reader(DocumentReader):
    """Reads one splitter manifest."""

    def read(self, value: Any) -> SplitterManifest:
        if not isinstance(value, Members):
            raise InvalidDocumentError([Problem("an object of rules by expressions of keys is expected")])
        if len(value.pairs) > MAX_RULES:
            self.refuse("", f"there are at most {MAX_RULES} rules")
        names = Counter(name for name, _ in value.pairs)
        for name in (name for name, count in names.items() if count > 1):
            self.refuse(name, "it is given twice")
        rules = [rule for name, item in value.pairs for rule in self._rule(name, item)]
        self.raise_problems()
        return SplitterManifest(tuple(rules))

    def _rule(self, name: str, value: Any) -> Iterator[Rule]:
        keys = self._pattern(name, name)
        members = self.members(value, name, {_DESCRIPTION, _DELIMITER, _STATIC, _REQUEST, _HASH})
        description = self._text(members.get(_DESCRIPTION), f"{name}.{_DESCRIPTION}")
        delimiter = self._text(members.get(_DELIMITER), f"{name}.{_DELIMITER}")
        readers = {_STATIC: self._static, _REQUEST: self._request, _HASH: self._hash}
        given = [kind for kind in readers if kind in members]
        postfixes = [readers[kind](members[kind], f"{name}.{kind}") for kind in given]
        if len(given) != 1 and isinstance(value, Members):
            self.refuse(name, f"exactly one of {', '.join(readers)} is expected")
        elif keys is not None and postfixes and (postfix := postfixes[0]) is not None:
            yield Rule(keys, postfix, DEFAULT_DELIMITER if delimiter is None else delimiter, description)

    def _static(self, value: Any, path: str) -> FromStatic | None:
        if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
            self.refuse(path, "a list of one name or more is expected; a name is a text, and not empty")
        elif len(value) > MAX_NAMES:
            self.refuse(path, f"there are at most {MAX_NAMES} names")
        elif len(set(value)) < len(value):
            twice = next(name for name, count in Counter(value).items() if count > 1)
            self.refuse(path, f"the name {twice!r} is given twice")
        else:
            return FromStatic(tuple(value))
        return None

    def _request(self, value: Any, path: str) -> FromRequest | None:
        members = self.members(value, path, {"header", "url"})
        header = self._text(members.get("header"), f"{path}.header", may_be_empty=False)
        expression = self._text(members.get("url"), f"{path}.url", may_be_empty=False)
        url = None if expression is None else self._pattern(expression, f"{path}.url")
        if isinstance(value, Members) and members.get("header") is None and members.get("url") is None:
            self.refuse(path, "header, or url, or both are expected")
        return FromRequest(url, header)

    def _hash(self, value: Any, path: str) -> FromHash | None:
        members = self.members(value, path, {"header", "buckets"})
        header = self._text(members.get("header"), f"{path}.header", may_be_empty=False)
        buckets = self.whole(members.get("buckets"), f"{path}.buckets", smallest=1, largest=MAX_NAMES)
        if isinstance(value, Members):
            for name in ("header", "buckets"):
                if members.get(name) is None:
                    self.refuse(f"{path}.{name}", "it is missing")
        return None if header is None or buckets is None else FromHash(header, buckets)

    def _text(self, value: Any, path: str, *, may_be_empty: bool = True) -> str | None:
        if value is None or (isinstance(value, str) and (value or may_be_empty)):
            return value
        self.refuse(path, "a text is expected" if may_be_empty else "a text that is not empty is expected")
        return None

    def _pattern(self, text: str, path: str) -> Pattern | None:
        try:
            return compile_pattern(text, path)
        except InvalidDocumentError as error:
            self.problems += error.problems
            return None


def _shown(rule: Rule) -> dict[str, Any]:
    members: dict[str, Any] = {} if rule.description is None else {_DESCRIPTION: rule.description}
    if rule.delimiter != DEFAULT_DELIMITER:
        members[_DELIMITER] = rule.delimiter
    match rule.postfix:
        case FromStatic(names):
            return members | {_STATIC: list(names)}
        case FromHash(header, buckets):
            return members | {_HASH: {"header": header, "buckets": buckets}}
        case FromRequest(url, header):
            given = {"url": url.text if url else None, "header": header}
            return members | {_REQUEST: {name: value for name, value in given.items() if value is not None}}


def _overlaps(rules: tuple[Rule, ...]) -> Iterator[Problem]:
    """Warn of each pair of rules that match a common key."""
    budget = SearchBudget(OVERLAP_STEPS)
    automata: list[tuple[Rule, Automaton]] = []
    for rule in rules:
        try:
            automaton = Automaton(rule.name)
            for earlier, other in automata:
                example = common_text(other, automaton, budget)
                if example is not None and _both_match(earlier, rule, example):
                    taken = f"it overlaps with {earlier.name!r}, which comes first and matches {example!r}, for example"
                    yield Problem(taken, path=rule.name)
        except UnsupportedExpressionError:
            yield Problem("cannot determine whether another rule matches some of its keys", path=rule.name)
        else:
            automata.append((rule, automaton))


def _both_match(rule: Rule, other: Rule, text: str) -> bool:
    return rule.keys.match(text) is not None and other.keys.match(text) is not None

"""The splitter: rules that distribute the requests of one key to several groups.

Pure except for the turns of static names, which are in memory only: a new leader begins with the first name again.
The rules are read by `manifest`. Source: docs/reference/routes/splitter.md; Gateleen queues.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from osrdyne.ingress.documents.patterns import Pattern
from osrdyne.ingress.requests import Arrival

DEFAULT_DELIMITER = "-"
REMEMBERED_KEYS = 10_000  # Keys whose rule is cached.


@dataclass(frozen=True, slots=True)
class FromStatic:
    """Round robin over the names, with one counter for each rule."""

    names: tuple[str, ...]

    def postfixes(self, arrival: Arrival, turn: int) -> tuple[str, ...] | str:
        return (self.names[turn % len(self.names)],)


@dataclass(frozen=True, slots=True)
class FromRequest:
    """Every group that `url` captures from the path, then the header. If one is missing, the key stays unchanged."""

    url: Pattern | None = None
    header: str | None = None

    def postfixes(self, arrival: Arrival, turn: int) -> tuple[str, ...] | str:
        found: tuple[str, ...] = ()
        if self.url is not None:
            groups = self.url.match(arrival.request.path)
            if groups is None:
                return f"its path does not match {self.url.text}"
            found = groups
        if self.header is not None:
            value = _header(arrival, self.header)
            if value is None:
                return f"it has no header {self.header}"
            found = (*found, value)
        return found or "the expression of the path captures nothing"

    @property
    def adds_nothing(self) -> bool:
        return self.header is None and self.url is not None and not self.url.groups


@dataclass(frozen=True, slots=True)
class FromHash:
    """A number below `buckets` that depends on the value of the header only, so that the requests of an entity stay in
    order. Additional buckets move only the entities that they receive: from 4 to 5 buckets, a fifth of them.
    """

    header: str
    buckets: int

    def postfixes(self, arrival: Arrival, turn: int) -> tuple[str, ...] | str:
        value = _header(arrival, self.header)
        if value is None:
            return f"it has no header {self.header}"
        # Not Python's `hash`, which differs from process to process: a new leader must find the same bucket.
        digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()
        return (str(jump_hash(int.from_bytes(digest[:8], "big"), self.buckets)),)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, for the keys that `keys` matches as a whole. Its name is the text of that expression."""

    keys: Pattern
    postfix: FromStatic | FromRequest | FromHash
    delimiter: str = DEFAULT_DELIMITER
    description: str | None = None

    @property
    def name(self) -> str:
        return self.keys.text


@dataclass(frozen=True, slots=True)
class Split:
    """The result for a key. `rule`: the name of the first rule that matches. `unchanged`: why that rule kept the key.

    `takes_turns`: the next request gets another key.
    """

    key: str
    rule: str | None = None
    unchanged: str | None = None
    takes_turns: bool = False


class Splitter:
    """Rules in their order: the first that matches a key applies."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._turns: Counter[str] = Counter()
        self._rule_of = lru_cache(REMEMBERED_KEYS)(self._find_rule)

    def split(self, arrival: Arrival) -> Split:
        """Decide about a request with a valid key, and advance the turn of a static rule."""
        split = self.preview(arrival)
        if split.rule is not None and split.takes_turns:
            # Not in `preview`: `explain` must not change the key of the next request.
            self._turns[split.rule] += 1
        return split

    def preview(self, arrival: Arrival) -> Split:
        """The decision of `split`, without advancing a turn."""
        key = arrival.request.key
        rule = self._rule_of(key)
        if rule is None:
            return Split(key)
        postfixes = rule.postfix.postfixes(arrival, self._turns[rule.name])
        if isinstance(postfixes, str):
            return Split(key, rule.name, postfixes)
        takes_turns = isinstance(rule.postfix, FromStatic)
        return Split(rule.delimiter.join((key, *postfixes)), rule.name, takes_turns=takes_turns)

    def prefix_of(self, key: str) -> str | None:
        """The prefix of every key that is split from this one; None if no rule matches it."""
        rule = self._rule_of(key)
        return None if rule is None else key + rule.delimiter

    def _find_rule(self, key: str) -> Rule | None:
        return next((rule for rule in self._rules if rule.keys.match(key) is not None), None)


def split_arrival(arrival: Arrival, split: Split) -> Arrival:
    """The request with its split key, which may be invalid."""
    if split.key == arrival.request.key:
        # The key is unchanged, and `split_from` is for changed keys only.
        return arrival
    return replace(arrival, request=replace(arrival.request, key=split.key), split_from=arrival.request.key)


def jump_hash(number: int, buckets: int) -> int:
    """The bucket of a 64-bit number. Source: Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm"."""
    bucket, following = -1, 0
    while following < buckets:
        bucket = following
        number = (number * 2862933555777941757 + 1) % 2**64
        following = int((bucket + 1) * (2**31 / ((number >> 33) + 1)))
    return bucket


def _header(arrival: Arrival, name: str) -> str | None:
    """A header as text, by its name in any case, or a system property such as `{$principal}`; None where it is missing,
    null, a list or a table."""
    if name.startswith("{$") and name.endswith("}"):
        value = arrival.sample.system_property(name[2:-1].lower())
    else:
        value = arrival.sample.header(name.lower())
    return value if isinstance(value, str) else None

"""The document of queue policies, checked as a whole: `{"policies": [{"match": "tpch/{scale}", "MaxQueueLength": 5}]}`.

`default` is the policy of the keys that no pattern matches; without it, no policy acts on them. `load_policies` reads
the text of a user, and `PolicyManifest.document` gives the form that is stored, which loads to the same policies. One
error refuses the whole document, and every error is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from osrdyne.config.profiles import MAX_PATTERN, compile_linear
from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.documents.reader import DocumentReader, Members, read_document, read_json
from osrdyne.ingress.policies.elements import BY_FIELD, BY_NAME
from osrdyne.protocol.key_patterns import KeyPattern

MAX_POLICIES = 200
LIFETIME = "expiration_instant"
CAPACITY = "max_queue_capacity"
SHOWN = "elements"
ANSWER = {
    SHOWN, "key", "queue", "exists", "created", "state", "reason", "author", "created_at", "expires_at", "proposal",
    "policy", "pool", "match", "links",
}  # fmt: skip
"""The members of an answer of the API with an effective policy. A proposal may be such an answer."""
COMPUTED = "it is computed from MaxQueueLength and MaxMessageSize: remove it"
_POLICIES, _DEFAULT, _MATCH = "policies", "default", "match"


@dataclass(frozen=True)
class KeyPolicy:
    """The proposal for the keys that a pattern matches; `match` None: for those that no pattern matches.

    `proposed`: by field name of `EffectivePolicy`.
    """

    match: str | None
    proposed: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def pattern(self) -> KeyPattern | None:
        return None if self.match is None else KeyPattern(self.match, compile=compile_linear)

    def matches(self, key: str) -> bool:
        try:
            return self.pattern is None or self.pattern.match(key) is not None
        except UnicodeEncodeError:  # a key with half of a surrogate pair matches no pattern
            return False

    def document(self) -> dict[str, Any]:
        shown = {BY_FIELD[name].name: BY_FIELD[name].show(value) for name, value in self.proposed.items()}
        return shown if self.match is None else {_MATCH: self.match, **shown}


@dataclass(frozen=True)
class PolicyManifest:
    """Policies in the order of the document: the first that matches a key applies, `default` if none does."""

    policies: tuple[KeyPolicy, ...] = ()
    default: KeyPolicy | None = None

    @property
    def places(self) -> list[tuple[str, KeyPolicy]]:
        """All policies, the default last, each with its path in the document."""
        listed = [(f"{_POLICIES}.{number}", policy) for number, policy in enumerate(self.policies)]
        return listed if self.default is None else [*listed, (_DEFAULT, self.default)]

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """For the author: elements without effect in a document."""
        return tuple(
            Problem("it acts only on created queues (osrdyne queues)", path=f"{path}.{BY_FIELD[LIFETIME].name}")
            for path, policy in self.places
            if LIFETIME in policy.proposed
        )

    @property
    def size(self) -> int:
        return len(self.places)

    def document(self) -> dict[str, Any]:
        default = {} if self.default is None else {_DEFAULT: self.default.document()}
        return {_POLICIES: [policy.document() for policy in self.policies], **default}


def load_policies(text: str) -> PolicyManifest:
    """Parse a document of JSON or YAML. Raises `InvalidDocumentError` with every error of the text."""
    return _Reader().read(read_document(text))


def load_policies_json(text: str) -> PolicyManifest:
    """As `load_policies`, but of JSON only. Raises `InvalidDocumentError`."""
    return _Reader().read(read_json(text))


def load_proposal(text: str) -> KeyPolicy:
    """The proposal for a single key, as JSON: the elements without a pattern, or an effective policy as the API
    returned it. Raises `InvalidDocumentError`."""
    return read_proposal(read_json(text))


def read_proposal(value: Any) -> KeyPolicy:
    """The same from a document that was read by `documents.reader`."""
    return _Reader().read_proposal(value)


class _Reader(DocumentReader):
    """Reads one document."""

    def __init__(self) -> None:
        super().__init__()
        self._matches: set[str] = set()

    def read(self, value: Any) -> PolicyManifest:
        members = self.members(value, "", {_POLICIES, _DEFAULT})
        listed = members.get(_POLICIES, [])
        if not isinstance(listed, list):
            self.refuse(_POLICIES, "a list of policies is expected")
        elif len(listed) > MAX_POLICIES:
            self.refuse(_POLICIES, f"there are {len(listed)} policies; at most {MAX_POLICIES} are possible")
        self.raise_problems()
        found = [policy for number, item in enumerate(listed) for policy in self._policy(number, item)]
        default = None
        if _DEFAULT in members:
            default = KeyPolicy(None, self._elements(self.members(members[_DEFAULT], _DEFAULT, {*BY_NAME}), _DEFAULT))
        self.raise_problems()
        return PolicyManifest(tuple(found), default)

    def read_proposal(self, value: Any) -> KeyPolicy:
        path = ""
        if isinstance(value, Members) and any(name == SHOWN for name, _ in value.pairs):
            value, path = self.members(value, "", ANSWER).get(SHOWN), SHOWN
        given = {name: _value(item) for name, item in self.members(value, path, {*BY_NAME}).items()}
        proposed = self._elements(given, path, may_repeat=True)
        self.raise_problems()
        return KeyPolicy(None, proposed)

    def _policy(self, number: int, value: Any) -> Iterator[KeyPolicy]:
        path = f"{_POLICIES}.{number}"
        members = self.members(value, path, {_MATCH, *BY_NAME})
        if not isinstance(value, Members):
            return
        match, place = members.pop(_MATCH, None), f"{path}.{_MATCH}"
        proposed = self._elements(members, path)
        if not isinstance(match, str):
            self.refuse(place, "the pattern of the keys is expected, such as tpch/{scale}")
        elif len(match) > MAX_PATTERN:
            self.refuse(place, f"a pattern has at most {MAX_PATTERN} characters")
        else:
            if match in self._matches:
                self.refuse(place, f"an earlier policy has the pattern {match!r}: remove one")
            self._matches.add(match)
            policy = KeyPolicy(match, proposed)
            try:
                _ = policy.pattern
            except ValueError as error:
                self.refuse(place, str(error))
            yield policy

    def _elements(self, members: Mapping[str, Any], path: str, *, may_repeat: bool = False) -> dict[str, Any]:
        """The elements by field name. `may_repeat`: also those that the pool computes."""
        proposed = {}
        for name, value in members.items():
            element, place = BY_NAME[name], f"{path}.{name}".lstrip(".")
            if element.is_computed and not may_repeat:
                self.refuse(place, COMPUTED)
                continue
            try:
                found = element.parse(value)
            except ValueError as error:
                self.refuse(place, str(error))
                continue
            proposed[element.field] = found
        return proposed


def _value(shown: Any) -> Any:
    """The value of an element as written, or as the API shows it: `{"value": 10, "origin": "default"}`."""
    return dict(shown.pairs).get("value", shown) if isinstance(shown, Members) else shown

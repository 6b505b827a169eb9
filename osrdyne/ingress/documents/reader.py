"""Read a document of JSON or YAML into plain values, and collect its errors.

Used by the readers of manifests. Mappings are read as `Members`, because a name may be given more than once: that is an
error, or has a meaning of its own (Azure IoT Edge routes).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from osrdyne.config.yaml_file import parse_yaml
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem

MAX_CHARACTERS = 16 * 2**20
MAX_VALUES = 1_000_000  # Of a document, by its commas, colons and opening brackets, those in strings included.
MAX_DIGITS = 100  # Digits of a whole number: far beyond every setting, and within what Python converts.


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an object in the order written, some perhaps more than once."""

    pairs: tuple[tuple[str, Any], ...]


def read_json(text: str) -> Any:
    """The values of a JSON text. Raises `InvalidDocumentError` with line and column."""
    _check_size(text)
    try:
        return _from_json(text)
    except json.JSONDecodeError as error:
        raise InvalidDocumentError([_not_json(error)]) from None


def read_document(text: str) -> Any:
    """The values of a text: JSON, JSON without its outermost braces as Azure IoT Edge routes prints it, or YAML.

    Raises `InvalidDocumentError`.
    """
    _check_size(text)
    json_error = None
    for attempt in (text, f"{{{text}}}"):
        try:
            return _from_json(attempt)
        except json.JSONDecodeError as error:
            json_error = json_error or error
    if text.lstrip().startswith(("{", '"')):
        assert json_error is not None
        raise InvalidDocumentError([_not_json(json_error)]) from None
    try:
        located = parse_yaml(text, "the document")
    except ConfigurationError as error:
        raise InvalidDocumentError([Problem(str(error))]) from None
    return None if located is None else from_plain(located.plain())


def _check_size(text: str) -> None:
    """Raises `InvalidDocumentError` for a text that would take too long to read: Python's JSON parser holds the GIL
    until it is done."""
    values = sum(map(text.count, "[{,:"))
    for limit, amount, unit in ((MAX_CHARACTERS, len(text), "characters"), (MAX_VALUES, values, "values")):
        if amount > limit:
            raise InvalidDocumentError([Problem(f"it has {amount} {unit}; a document has at most {limit}")])


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: Members(tuple(pairs)), parse_int=_whole_number)
    except RecursionError:
        raise InvalidDocumentError([Problem("it is nested too deeply")]) from None
    return _valid_unicode(value)


def _not_json(error: json.JSONDecodeError) -> Problem:
    return Problem(f"this is not JSON: {error.msg}", error.colno, line=error.lineno)


def from_plain(value: Any) -> Any:
    """The same values with `Members` for mappings. Raises `InvalidDocumentError` for text that is not valid Unicode."""
    return _valid_unicode(_with_members(value))


def _with_members(value: Any) -> Any:
    if isinstance(value, dict):
        return Members(tuple((name, _with_members(item)) for name, item in value.items()))
    return [_with_members(item) for item in value] if isinstance(value, list) else value


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidDocumentError([Problem(f"a whole number has at most {MAX_DIGITS} digits, one here has more")])
    return int(digits)


def _valid_unicode(value: Any) -> Any:
    """Return the value. Raises `InvalidDocumentError` for half of a surrogate pair, which no UTF-8 text can hold."""
    problems = [
        Problem("it has half of a surrogate pair, such as \\ud800, which is not valid Unicode", path=path)
        for path in _half_surrogates(value, "")
    ]
    if problems:
        raise InvalidDocumentError(problems)
    return value


def _half_surrogates(value: Any, path: str) -> Iterator[str]:
    """The paths of all strings that cannot be encoded, including names of members."""
    if isinstance(value, Members):
        for name, item in value.pairs:
            place = f"{path}.{name}" if path else str(name)
            if _has_half_surrogate(name):
                yield place
            yield from _half_surrogates(item, place)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _half_surrogates(item, f"{path}[{number}]")
    elif _has_half_surrogate(value):
        yield path


def _has_half_surrogate(value: object) -> bool:
    return isinstance(value, str) and not value.isascii() and any("\ud800" <= symbol <= "\udfff" for symbol in value)


class DocumentReader:
    """Base of the readers of manifests: collects every error with its path."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def refuse(self, path: str, message: str, column: int | None = None) -> None:
        self.problems.append(Problem(message, column, path))

    def warn(self, path: str, message: str) -> None:
        self.warnings.append(Problem(message, path=path))

    def raise_problems(self) -> None:
        """Raises `InvalidDocumentError` if an error was collected."""
        if self.problems:
            raise InvalidDocumentError(self.problems)

    def members(self, value: Any, path: str, known: set[str]) -> dict[str, Any]:
        """The known members of an object. An unknown or repeated one is an error."""
        if not isinstance(value, Members):
            self.refuse(path, f"an object with {', '.join(sorted(known))} is expected")
            return {}
        found: dict[str, Any] = {}
        for name, item in value.pairs:
            place = f"{path}.{name}" if path else name
            if name not in known:
                self.refuse(place, f"unknown member; the members are {', '.join(sorted(known))}")
            elif name in found:
                self.refuse(place, "it is given twice")
            found[name] = item
        return {name: item for name, item in found.items() if name in known}

    def whole(self, value: Any, path: str, *, smallest: int = 0, largest: int) -> int | None:
        """A whole number in bounds, or None."""
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest):
            return value
        self.refuse(path, f"a whole number from {smallest} to {largest} is expected")
        return None

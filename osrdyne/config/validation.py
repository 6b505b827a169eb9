"""Says in plain words what pydantic found wrong. Never repeats a value: it may be a secret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from osrdyne.config.schema import Path
from osrdyne.config.sources import Problem

_MESSAGES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "bool_parsing": lambda _: "must be true or false",
    "bool_type": lambda _: "must be true or false",
    "int_from_float": lambda _: "must be a whole number",
    "int_parsing": lambda _: "must be a whole number",
    "int_type": lambda _: "must be a whole number",
    "string_type": lambda _: "must be text; put it in quotes",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be a mapping",
    "literal_error": lambda context: f"must be {context['expected']}",
    "greater_than_equal": lambda context: f"must be at least {context['ge']:g}",
    "greater_than": lambda context: f"must be more than {context['gt']:g}",
    "less_than_equal": lambda context: f"must be at most {context['le']:g}",
    "value_error": lambda context: str(context["error"]),
}


def problems_of(error: ValidationError, origins: Mapping[Path, str]) -> list[Problem]:
    """One problem for each thing that is wrong, with the origin of the value."""
    details = error.errors(include_url=False, include_input=False)
    return [_problem(detail, origins) for detail in details]


def _problem(detail: ErrorDetails, origins: Mapping[Path, str]) -> Problem:
    path = tuple(str(part) for part in detail["loc"])
    say = _MESSAGES.get(detail["type"])
    message = say(detail.get("ctx", {})) if say else detail["msg"][:1].lower() + detail["msg"][1:]
    return Problem(path, _origin(path, origins), message)


def _origin(path: Path, origins: Mapping[Path, str]) -> str | None:
    """Of the value itself, of the list or mapping it is in, or of the values of the section that disagree."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    inside = dict.fromkeys(origin for known, origin in origins.items() if known[: len(path)] == path)
    return ", ".join(inside) if 0 < len(inside) <= 3 else None

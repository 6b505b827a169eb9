"""Reads a document of JSON or YAML into plain values, and notices names that are given more than once.

Used by `manifest`. Mappings come as `Members`, because the seed gives a name a meaning that occurs twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from osrdyne.config.yaml_file import parse_yaml
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.problems import InvalidDocumentError, Problem


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an object in the order written, some perhaps more than once."""

    pairs: tuple[tuple[str, Any], ...]


def read_document(text: str) -> Any:
    """The values of a text: JSON, JSON without its outermost braces as seed 000 prints it, or YAML.

    Raises `InvalidDocumentError`.
    """
    json_error = None
    for attempt in (text, f"{{{text}}}"):
        try:
            return json.loads(attempt, object_pairs_hook=lambda pairs: Members(tuple(pairs)))
        except json.JSONDecodeError as error:
            json_error = json_error or error
        except RecursionError:
            raise InvalidDocumentError([Problem("it is nested too deeply")]) from None
    if text.lstrip().startswith(("{", '"')):
        assert json_error is not None
        raise InvalidDocumentError(
            [Problem(f"line {json_error.lineno} is not JSON: {json_error.msg}", json_error.colno)]
        ) from None
    try:
        located = parse_yaml(text, "the manifest")
    except ConfigurationError as error:
        raise InvalidDocumentError([Problem(str(error))]) from None
    return None if located is None else from_plain(located.plain())


def from_plain(value: Any) -> Any:
    """Values as the document would give them, from those that JSON or YAML has read."""
    if isinstance(value, dict):
        return Members(tuple((name, from_plain(item)) for name, item in value.items()))
    return [from_plain(item) for item in value] if isinstance(value, list) else value

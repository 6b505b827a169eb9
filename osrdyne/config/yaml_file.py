"""Reads a YAML file into values with their lines. Independent of the settings.

Stricter than PyYAML's own loader: it refuses duplicate keys, tags, merge keys and keys that are not text. All values
are text except `true`, `false`, `null` and numbers (YAML 1.2's core schema), so `no`, `on`, `10:30` and `2024-01-01`
are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from osrdyne.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Located:
    """A value and its line, from 1. The items of a list or mapping are `Located`, too."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {name: item.plain() for name, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class _CoreSchemaLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces the inherited one


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
):
    _CoreSchemaLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def read_yaml(file: str) -> Located | None:
    """The content of a file; None when it is empty. Raises `ConfigurationError` naming the file and the line."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"Cannot read the configuration file {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The configuration file {file} is not UTF-8.") from error
    return parse_yaml(text, file)


def parse_yaml(text: str, file: str) -> Located | None:
    """The content of a text that was read from `file`; None when it is empty. Raises `ConfigurationError`."""
    try:
        node = yaml.compose(text, Loader=_CoreSchemaLoader)
        return None if node is None else _located(node, file, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{file}{line} is not valid YAML: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file} is not valid YAML: it holds characters that YAML does not allow.") from error
    except RecursionError as error:
        raise ConfigurationError(f"{file} is nested too deeply.") from error


def _located(node: yaml.Node, file: str, above: tuple[int, ...]) -> Located:
    line = node.start_mark.line + 1
    if id(node) in above:
        raise ConfigurationError(f"{file}:{line}: the value contains itself.")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        return Located(_mapping(node, file, above), line)
    if isinstance(node, yaml.SequenceNode):
        return Located([_located(item, file, above) for item in node.value], line)
    assert isinstance(node, yaml.ScalarNode)
    return Located(_scalar(node, file), line)


def _mapping(node: yaml.MappingNode, file: str, above: tuple[int, ...]) -> dict[str, Located]:
    found: dict[str, Located] = {}
    for key_node, value_node in node.value:
        where = f"{file}:{key_node.start_mark.line + 1}"
        key = _scalar(key_node, file) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise ConfigurationError(f"{where}: the key {key_node.value!r:.40} is not text; put it in quotes.")
        if key == "<<":
            raise ConfigurationError(f"{where}: merge keys (<<) are not supported.")
        if key in found:
            raise ConfigurationError(f"{where}: {key} is given twice; the first time in line {found[key].line}.")
        # The line of the key, not of the value: for a mapping the value begins on the next one.
        found[key] = Located(_located(value_node, file, above).value, key_node.start_mark.line + 1)
    return found


def _scalar(node: yaml.ScalarNode, file: str) -> Any:
    where = f"{file}:{node.start_mark.line + 1}"
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "str":
            return node.value
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int":
            return int(node.value, 0) if node.value[:2] in {"0x", "0o"} else int(node.value)
        case "float":
            return float(node.value.replace(".inf", "inf").replace(".nan", "nan"))
        case tag:
            raise ConfigurationError(f"{where}: the tag {tag} is not supported; write plain text.")

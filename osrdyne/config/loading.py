"""Loads the settings from flags, environment, file and defaults, in this order of precedence, with the origin of each.

Called once by each command. All mistakes are reported together as one `ConfigurationError`, one line each with path,
place and remedy; no message contains a secret. Below a mapping (`worker.config`, `driver.options`) the sources are
merged key by key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from osrdyne.config.models import Settings
from osrdyne.config.schema import Path, all_settings
from osrdyne.config.sources import Entry, Problem, from_assignment, from_environment, from_file, split
from osrdyne.config.yaml_file import read_yaml
from osrdyne.errors import ConfigurationError

DEFAULT_FILE = "osrdyne.yaml"
FILE_VARIABLE = "OSRDYNE_CONFIG"
DEFAULT_ORIGIN = "default"


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings, and the origin of every value: `file osrdyne.yaml:12`, `environment OSRDYNE__POOL__ID`, `flag
    --set`, `default`. Each value below a mapping has its own origin."""

    settings: Settings
    origins: Mapping[Path, str]


def load_settings(
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """Read and validate all sources. Raises `ConfigurationError`.

    `file`: the flag `--config` (else `OSRDYNE_CONFIG`, else `osrdyne.yaml` if it exists). `assignments`: the texts
    `path=value` of `--set`. `flags`: the same for dedicated flags, by name, such as `{"--pool": "pool.id=x"}`.
    """
    environment = os.environ if environment is None else environment
    file = file or environment.get(FILE_VARIABLE) or (DEFAULT_FILE if FilePath(DEFAULT_FILE).exists() else None)
    found = [
        *(from_file(read_yaml(file), file) if file else ()),
        *from_environment(environment),
        *(one for text in assignments for one in from_assignment(text)),
        *(one for name, text in (flags or {}).items() for one in from_assignment(text, f"flag {name}")),
    ]
    entries, problems = split(found)
    effective = _merge(entries)
    effective, more = _read_secret_files(effective)
    return _validate(effective, [*problems, *more])


def _merge(entries: Sequence[Entry]) -> dict[Path, Entry]:
    """Keep the last entry of each path. An entry also replaces entries below its path, and those of which its path is a
    part."""
    merged: dict[Path, Entry] = {}
    for entry in entries:
        size = len(entry.path)
        merged = {
            path: other
            for path, other in merged.items()
            if path[:size] != entry.path and entry.path[: len(path)] != path
        }
        merged[entry.path] = entry
    return merged


def _read_secret_files(entries: Mapping[Path, Entry]) -> tuple[dict[Path, Entry], list[Problem]]:
    """Add the content of every `x_file` as `x`."""
    result = dict(entries)
    problems = []
    for setting in all_settings().values():
        entry = entries.get(setting.path)
        if setting.file_of is None or entry is None or not isinstance(entry.value, str):
            continue
        if (direct := entries.get(setting.file_of)) is not None:
            other = f"{'.'.join(setting.file_of)} ({direct.origin})"
            problems.append(Problem(setting.path, entry.origin, f"set either this or {other}, not both"))
            continue
        try:
            text = FilePath(entry.value).read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            problems.append(Problem(setting.path, entry.origin, f"cannot read {entry.value}: {reason}"))
            continue
        if not text:
            problems.append(Problem(setting.path, entry.origin, f"{entry.value} is empty"))
            continue
        result[setting.file_of] = Entry(setting.file_of, text, f"file {entry.value}, named by {entry.origin}")
    return result, problems


def _validate(entries: Mapping[Path, Entry], problems: Sequence[Problem]) -> LoadedSettings:
    origins = {path: entry.origin for path, entry in entries.items()}
    problems = list(problems)
    try:
        settings = Settings.model_validate(_nested(entries))
    except ValidationError as error:
        problems += problems_of(error, origins)
    if problems:
        raise _error(problems)
    for path in all_settings():
        if not any(known[: len(path)] == path for known in origins):
            origins[path] = DEFAULT_ORIGIN
    return LoadedSettings(settings, MappingProxyType(origins))


def _nested(entries: Mapping[Path, Entry]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, entry in entries.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = entry.value
    return tree


def _error(problems: Sequence[Problem]) -> ConfigurationError:
    lines = [str(problem) for problem in problems]
    if len(lines) == 1:
        return ConfigurationError(f"Wrong configuration: {lines[0]}")
    return ConfigurationError("\n  ".join([f"Wrong configuration, {len(lines)} mistakes:", *lines]))


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
    """One problem for each error of pydantic, with the origin of the value. Without values: they may be secrets."""
    details = error.errors(include_url=False, include_input=False)
    return [_problem(detail, origins) for detail in details]


def _problem(detail: ErrorDetails, origins: Mapping[Path, str]) -> Problem:
    path = tuple(str(part) for part in detail["loc"])
    describe = _MESSAGES.get(detail["type"])
    message = describe(detail.get("ctx", {})) if describe else detail["msg"][:1].lower() + detail["msg"][1:]
    return Problem(path, _origin(path, origins), message)


def _origin(path: Path, origins: Mapping[Path, str]) -> str | None:
    """The origin of the value, of the list or mapping that contains it, or of up to three values of its section."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    inside = dict.fromkeys(origin for known, origin in origins.items() if known[: len(path)] == path)
    return ", ".join(inside) if 0 < len(inside) <= 3 else None

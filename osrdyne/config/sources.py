"""The sources of settings: a YAML file, the environment, flags. Each source becomes a list of entries, one per value.

An unknown path becomes a `Problem` with a suggestion. The models validate the values.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from osrdyne.config.schema import Kind, Path, Setting, all_settings, sections
from osrdyne.config.yaml_file import Located

ENVIRONMENT_PREFIX = "OSRDYNE__"
_NEAR_PREFIX = "OSRDYNE_"
OTHER_VARIABLES: Mapping[str, Path] = {
    # Of the hub of Azure IoT Edge (seed 000), in any case.
    "CHECKENTIREQUEUEONCLEANUP": ("requests", "check_entire_queue_on_cleanup"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of one path, with its origin: `file osrdyne.yaml:12`, `environment OSRDYNE__POOL__ID`."""

    path: Path
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, printed as `path (origin): message`."""

    path: Path
    origin: str | None
    message: str

    def __str__(self) -> str:
        if not self.path and self.origin is None:
            return self.message
        where = f" ({self.origin})" if self.origin else ""
        return f"{'.'.join(self.path) or 'the configuration'}{where}: {self.message}"


Found = Entry | Problem


def from_file(content: Located | None, file: str) -> Iterator[Found]:
    """The entries of a YAML file. An empty section (`broker:`) sets nothing."""
    if content is None or content.value is None:
        return
    yield from _from_section(content, (), file)


def _from_section(content: Located, path: Path, file: str) -> Iterator[Found]:
    origin = f"file {file}:{content.line}"
    if not isinstance(content.value, dict):
        yield _short_form(path, content.plain(), origin)
        return
    for name, item in content.value.items():
        yield from _from_item(item, (*path, name), file)


def _from_item(item: Located, path: Path, file: str) -> Iterator[Found]:
    origin = f"file {file}:{item.line}"
    setting = all_settings().get(path)
    if setting is not None and setting.kind.is_mapping and isinstance(item.value, dict):
        yield from _leaves(item, path, file)
    elif setting is not None:
        if not (setting.kind.is_mapping and item.value is None):
            yield Entry(path, item.plain(), origin)
    elif path not in sections():
        yield _unknown(path, origin)
    elif item.value is not None:
        yield from _from_section(item, path, file)


def _leaves(item: Located, path: Path, file: str) -> Iterator[Entry]:
    for name, inner in item.value.items():
        if isinstance(inner.value, dict) and inner.value:
            yield from _leaves(inner, (*path, name), file)
        else:
            yield Entry((*path, name), inner.plain(), f"file {file}:{inner.line}")


def _short_form(path: Path, value: Any, origin: str) -> Found:
    """The entry of `driver: noop`, which is short for its name. Every other section must be a mapping."""
    if path == ("driver",) and isinstance(value, str):
        return Entry((*path, "name"), value, origin)
    return Problem(path, origin, "must be a mapping of settings")


def from_environment(environment: Mapping[str, str]) -> Iterator[Found]:
    """The entries of all variables that begin with `OSRDYNE__`, and of `OTHER_VARIABLES`, in any case."""
    seen: dict[Path, str] = {}
    for variable in sorted(environment):
        name = variable.upper()
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(part.lower() for part in name.removeprefix(ENVIRONMENT_PREFIX).split("__"))
        elif name in OTHER_VARIABLES:
            path = OTHER_VARIABLES[name]
        else:
            if (problem := _misspelt(variable, name)) is not None:
                yield problem
            continue
        origin = f"environment {variable}"
        if path in seen:
            yield Problem(path, origin, f"{seen[path]} sets it, too; remove one of them")
        seen[path] = variable
        yield from from_text(path, environment[variable], origin)


def _misspelt(variable: str, name: str) -> Problem | None:
    """The problem of a variable that would set something if its underscores were doubled. None for other variables,
    such as those that Kubernetes sets for a service called `osrdyne` (`OSRDYNE_PORT`)."""
    if not name.startswith(_NEAR_PREFIX):
        return None
    rest = name.removeprefix(_NEAR_PREFIX).lower()
    path = tuple(rest.split("__"))
    if len(path) == 1:
        # Kubernetes names the port of a service `osrdyne-api` OSRDYNE_API_PORT.
        same = [known for known in all_settings() if len(known) > 1 and "_".join(known) == rest]
        path = same[0] if same and not rest.endswith("_port") else ()
    if not path or (path not in all_settings() and path not in sections() and _mapping_above(path) is None):
        return None
    right = ENVIRONMENT_PREFIX + "__".join(path).upper()
    return Problem(path, f"environment {variable}", f"is not read: write {right}, with two underscores each")


def from_assignment(text: str, origin: str = "flag --set") -> Iterator[Found]:
    """The entry of one flag `path=value`. Secrets are refused, because every user sees flags in the process list."""
    name, equals, value = text.partition("=")
    path = tuple(name.strip().split("."))
    setting = all_settings().get(path)
    if not equals:
        yield Problem((), None, f"{origin}: {name!r} is not path=value, such as pool.id=example")
    elif setting is not None and setting.secret:
        advice = f"set {setting.variable} or {setting.name}_file instead"
        yield Problem(path, origin, f"is a secret, and the process list shows flags; {advice}")
    else:
        yield from from_text(path, value, origin)


def from_text(path: Path, text: str, origin: str) -> Iterator[Found]:
    """The entries of a value as text; JSON for lists, mappings and sections."""
    inside = _mapping_above(path)
    if inside is not None:
        yield _entry_inside(inside, path, text, origin)
        return
    setting = all_settings().get(path)
    if setting is None and path not in sections():
        yield _unknown(path, origin)
    elif setting is None and not text.lstrip().startswith("{"):
        yield _short_form(path, text, origin)
    elif setting is not None and setting.kind is Kind.TEXT:
        yield Entry(path, None if setting.optional and text == "null" else text, origin)
    else:
        yield from _from_json(path, text, origin)


def _from_json(path: Path, text: str, origin: str) -> Iterator[Found]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        kind = "list" if path in all_settings() and all_settings()[path].kind is Kind.LIST else "object"
        yield Problem(path, origin, f"must be a JSON {kind}")
        return
    for found in _from_item(_unlocated(value), path, ""):
        yield (
            Entry(found.path, found.value, origin)
            if isinstance(found, Entry)
            else Problem(found.path, origin, found.message)
        )


def _unlocated(value: Any) -> Located:
    if isinstance(value, dict):
        return Located({name: _unlocated(item) for name, item in value.items()}, 0)
    if isinstance(value, list):
        return Located([_unlocated(item) for item in value], 0)
    return Located(value, 0)


def _mapping_above(path: Path) -> Setting | None:
    for length in range(1, len(path)):
        setting = all_settings().get(path[:length])
        if setting is not None and setting.kind.is_mapping:
            return setting
    return None


def _entry_inside(setting: Setting, path: Path, text: str, origin: str) -> Entry:
    """The entry of a value below a mapping. A mapping of texts has one key, as in
    `worker.spark_conf.spark.ui.enabled=false`; in others the keys are nested."""
    if setting.kind is Kind.TEXTS:
        return Entry((*setting.path, ".".join(path[len(setting.path) :])), text, origin)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return Entry(path, value, origin)


def _unknown(path: Path, origin: str) -> Problem:
    return Problem(path, origin, f"unknown setting{_suggestion(path)}")


def _suggestion(path: Path) -> str:
    names = [".".join(known) for known in (*all_settings(), *sections()) if known]
    near = difflib.get_close_matches(".".join(path), names, n=1, cutoff=0.75)
    if not near:  # a setting of the same name in another section
        near = [name for name in names if name.rpartition(".")[2] == path[-1]][:1]
    return f"; did you mean {near[0]}?" if near else ""


def split(found: Iterable[Found]) -> tuple[list[Entry], list[Problem]]:
    """Separate entries and problems, both in order."""
    items = list(found)
    return [one for one in items if isinstance(one, Entry)], [one for one in items if isinstance(one, Problem)]

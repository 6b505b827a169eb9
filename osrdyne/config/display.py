"""The effective settings as they may be shown: every value with its origin, and no secret. Used by `check-config`.

The type of a setting determines what is shown: of a `SecretStr` the URI without its password, of a type with `ShownBy`
the result of its function, of other types the value. The texts in a free mapping (an application's configuration,
environment variables) are hidden, because any of them may be a secret, unless the mapping has a `PublicMarker`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from osrdyne.config.loading import LoadedSettings
from osrdyne.config.schema import Path, all_settings
from osrdyne.config.types import PublicMarker, ShownBy
from osrdyne.logs import mask_uri

MASK = "***"
DRIVER_OPTIONS: Path = ("driver", "options")


@dataclass(frozen=True, slots=True)
class Shown:
    """One value, JSON-like, with masked secrets."""

    path: Path
    value: Any
    origin: str


def shown_settings(loaded: LoadedSettings, *, driver_options: type[BaseModel] | None = None) -> list[Shown]:
    """All settings in the order of the models, mappings value by value.

    `driver_options`: the model of the driver's own options; without it, all their texts are hidden.
    """
    models = {} if driver_options is None else {DRIVER_OPTIONS: driver_options}
    return [
        shown
        for setting in all_settings().values()
        for shown in _shown(loaded, setting.path, setting.field, models.get(setting.path))
    ]


def _shown(loaded: LoadedSettings, path: Path, field: FieldInfo, model: type[BaseModel] | None) -> Iterator[Shown]:
    value: Any = loaded.settings
    for part in path:
        value = getattr(value, part)
    if isinstance(value, Mapping) and value:
        yield from _inside(loaded, path, value, model=model, hidden=may_hold_secret(field))
    else:
        yield Shown(path, _masked_field(field, value), loaded.origins[path])


def _inside(
    loaded: LoadedSettings, path: Path, value: Mapping[str, Any], *, model: type[BaseModel] | None, hidden: bool
) -> Iterator[Shown]:
    """The values of a mapping. `model`: the types of its values."""
    fields = {} if model is None else model.model_fields
    for name, item in value.items():
        below = (*path, name)
        inner = _model_of(fields.get(name))
        secret = hidden if name not in fields else may_hold_secret(fields[name])
        if isinstance(item, Mapping) and item:
            yield from _inside(loaded, below, item, model=inner, hidden=secret)
        else:
            yield Shown(below, _masked(item, hidden=secret), _origin(loaded.origins, below))


def _origin(origins: Mapping[Path, str], path: Path) -> str:
    return next(origins[path[:size]] for size in range(len(path), 0, -1) if path[:size] in origins)


def may_hold_secret(field: FieldInfo) -> bool:
    """Whether values of the field may contain a secret: it is a free mapping, or of any type."""
    return not any(isinstance(mark, PublicMarker) for mark in field.metadata) and _is_free(field.annotation)


def _is_free(annotation: object) -> bool:
    if annotation is Any or annotation is SecretStr or typing.get_origin(annotation) in {dict, Mapping}:
        return True
    inner = typing.get_args(annotation)
    return not any(isinstance(one, PublicMarker) for one in inner) and any(_is_free(one) for one in inner)


def _model_of(field: FieldInfo | None) -> type[BaseModel] | None:
    annotation = None if field is None else field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _masked_field(field: FieldInfo, value: Any) -> Any:
    """The value of a field, masked by the type of the field."""
    parts = (part for one in typing.get_args(field.annotation) for part in typing.get_args(one))
    mark = next((one for one in (*field.metadata, *parts) if isinstance(one, ShownBy)), None)
    if mark is not None and isinstance(value, str):
        return mark.show(value)
    return _masked(value, hidden=may_hold_secret(field))


def _masked(value: Any, *, hidden: bool = False) -> Any:
    match value:
        case SecretStr():
            return masked_uri(value.get_secret_value())
        case BaseModel():  # an entry of a list, such as a profile: the fields that are set, each by its type
            fields = type(value).model_fields
            given = {name: getattr(value, name) for name in fields if name in value.model_fields_set}
            return {name: _masked_field(fields[name], item) for name, item in given.items()}
        case Mapping():
            return {name: _masked(item, hidden=hidden) for name, item in value.items()}
        case list() | tuple():
            return [_masked(item, hidden=hidden) for item in value]
        case None | bool():
            return value
        case _ if hidden:
            return MASK
        case str():
            return mask_uri(value)
        case _:
            return value


def masked_uri(uri: str) -> str:
    """A URI without its password and query; `***` if it cannot be parsed safely."""
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError:
        return MASK
    if not parts.scheme or not host or parts.fragment or "@" in parts.path + parts.query:
        return MASK
    user = f"{parts.username}:{MASK}@" if parts.password is not None else f"{parts.username}@" if parts.username else ""
    address = f"[{host}]" if ":" in host else host
    query = f"?{MASK}" if parts.query else ""
    return f"{parts.scheme}://{user}{address}{f':{port}' if port is not None else ''}{parts.path}{query}"

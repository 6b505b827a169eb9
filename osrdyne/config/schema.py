"""The settings of `Settings` as a flat list, by path, without values.

Derived from the models, so that loading, `check-config`, the documentation and the tests have the same list.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from osrdyne.config.models import Settings

# The path of a setting: `("broker", "tls", "verify")`. Below a mapping such as `worker.config`, its own keys follow.
Path = tuple[str, ...]


class Kind(Enum):
    """The form of the value of a setting in the environment and in flags."""

    TEXT = "text"
    LIST = "list"
    MAPPING = "mapping"
    TEXTS = "mapping of texts"

    @property
    def is_mapping(self) -> bool:
        return self in {Kind.MAPPING, Kind.TEXTS}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `secret`: its value is never shown. `file_of`: it names a file with the value of this setting."""

    path: Path
    field: FieldInfo
    kind: Kind
    optional: bool
    secret: bool
    file_of: Path | None = None

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "__".join(("OSRDYNE", *(part.upper() for part in self.path)))


@cache
def all_settings() -> Mapping[Path, Setting]:
    """All settings by path, in the order of the models."""
    return MappingProxyType({setting.path: setting for setting in _walk(Settings, ())})


@cache
def sections() -> Mapping[Path, type[BaseModel]]:
    """All sections by path; that of all settings is `()`."""
    return MappingProxyType(dict(_sections(Settings, ())))


def _sections(model: type[BaseModel], path: Path) -> Iterator[tuple[Path, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        if (inner := _model_of(field)) is not None:
            yield from _sections(inner, (*path, name))


def _walk(model: type[BaseModel], path: Path) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        if (inner := _model_of(field)) is not None:
            yield from _walk(inner, (*path, name))
        else:
            yield _setting(model, path, name, field)


def _setting(model: type[BaseModel], path: Path, name: str, field: FieldInfo) -> Setting:
    types = _alternatives(field.annotation)
    sibling = name.removesuffix("_file")
    return Setting(
        path=(*path, name),
        field=field,
        kind=_kind(types),
        optional=NoneType in types,
        secret=SecretStr in types,
        file_of=(*path, sibling) if sibling != name and sibling in model.model_fields else None,
    )


def _kind(types: tuple[object, ...]) -> Kind:
    for candidate in types:
        origin = typing.get_origin(candidate)
        if origin in {tuple, list}:
            return Kind.LIST
        if origin is dict:
            return Kind.TEXTS if typing.get_args(candidate)[1] is str else Kind.MAPPING
    return Kind.TEXT


def _alternatives(annotation: object) -> tuple[object, ...]:
    """The types of `A | B`, without `Annotated`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in {UnionType, typing.Union}:
        return tuple(one for inner in typing.get_args(annotation) for one in _alternatives(inner))
    return (annotation,)


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None

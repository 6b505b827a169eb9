"""The effective settings for people: every value with its origin, and no secret. Used by `check-config`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from osrdyne.config.loading import LoadedSettings
from osrdyne.config.schema import Path, all_settings
from osrdyne.logs import mask_uri

MASK = "***"

_SECRET_NAME = re.compile(r"passw|pwd|secret|token|credential|key", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shown:
    """One value as it may be shown: JSON-like, secrets masked."""

    path: Path
    value: Any
    origin: str


def shown_settings(loaded: LoadedSettings) -> list[Shown]:
    """Every setting in the order of the models; mappings value by value."""
    return [shown for setting in all_settings().values() for shown in _shown(loaded, setting.path)]


def _shown(loaded: LoadedSettings, path: Path) -> Iterator[Shown]:
    value: Any = loaded.settings
    for part in path:
        value = getattr(value, part)
    if isinstance(value, Mapping) and value:
        yield from _inside(loaded, path, value, hidden=False)
    else:
        yield Shown(path, _masked(value), loaded.origins[path])


def _inside(loaded: LoadedSettings, path: Path, value: Mapping[str, Any], *, hidden: bool) -> Iterator[Shown]:
    for name, item in value.items():
        below = (*path, name)
        secret = hidden or is_secret_name(name)
        if isinstance(item, Mapping) and item:
            yield from _inside(loaded, below, item, hidden=secret)
        else:
            yield Shown(below, _masked(item, hidden=secret), _origin(loaded.origins, below))


def _origin(origins: Mapping[Path, str], path: Path) -> str:
    return next(origins[path[:size]] for size in range(len(path), 0, -1) if path[:size] in origins)


def is_secret_name(name: str) -> bool:
    """Whether a name in a free mapping suggests a secret: it contains password, secret, token, credential or key.

    `key` and `keys` alone are this product's word for what a worker serves.
    """
    return _SECRET_NAME.search(name) is not None and name.lower() not in {"key", "keys"}


def _masked(value: Any, *, hidden: bool = False) -> Any:
    match value:
        case SecretStr():
            return masked_uri(value.get_secret_value())
        case Mapping():
            return {name: _masked(item, hidden=hidden or is_secret_name(name)) for name, item in value.items()}
        case list() | tuple():
            return [_masked(item, hidden=hidden) for item in value]
        case None:
            return None
        case _ if hidden:
            return MASK
        case str():
            return mask_uri(value)
        case _:
            return value


def masked_uri(uri: str) -> str:
    """A URI without its password and query; `***` when it cannot be taken apart safely."""
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

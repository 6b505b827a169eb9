"""Writes the tables of settings into `docs/reference/configuration/settings.md`: `python -m osrdyne.config.document`.

A test fails if the page is out of date.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path as FilePath
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic import SecretStr

from osrdyne.config.display import masked_uri
from osrdyne.config.schema import Path, Setting, all_settings, sections
from osrdyne.config.types import Duration, Size, duration_text, size_text

BEGIN = "<!-- settings: written by `python -m osrdyne.config.document` -->"
END = "<!-- end of settings -->"


def settings_table() -> str:
    """One table for each section: setting, default, meaning."""
    grouped: dict[Path, list[Setting]] = {}
    for setting in all_settings().values():
        grouped.setdefault(setting.path[:-1], []).append(setting)
    return "\n".join(_section(path, settings) for path, settings in grouped.items())


def update(page: str) -> str:
    """Replace the tables between the marks of the page."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{settings_table()}\n{END}{tail}"


def _section(path: Path, settings: list[Setting]) -> str:
    description = " ".join((sections()[path].__doc__ or "").partition("\n\n")[0].split())
    rows = [
        f"| `{setting.name}` | {_default(setting)} | {(setting.field.description or '').replace('|', chr(92) + '|')}"
        f"{_limits(setting)} |"
        for setting in settings
    ]
    return "\n".join(
        (f"## `{'.'.join(path)}`", description, "", "| setting | default | meaning |", "|---|---|---|", *rows, "")
    )


def _default(setting: Setting) -> str:
    value: Any = setting.field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "none"
    if isinstance(value, SecretStr):
        return f"`{masked_uri(value.get_secret_value())}`"
    if _is(setting, Duration):
        return f"`{duration_text(value)}`"
    if _is(setting, Size):
        return f"`{size_text(value)}`"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _limits(setting: Setting) -> str:
    texts = []
    for limit in setting.field.metadata:
        match limit:
            case Ge(ge=value):
                texts.append(f"≥ {value}")
            case Gt(gt=value):
                texts.append(f"> {value}")
            case Le(le=value):
                texts.append(f"≤ {value}")
    if typing.get_origin(setting.field.annotation) is typing.Literal:
        texts.append(", ".join(f"`{one}`" for one in typing.get_args(setting.field.annotation)))
    return f" ({', '.join(texts)})" if texts else ""


def _is(setting: Setting, alias: Any) -> bool:
    """Whether the setting has an annotated type, whose validator pydantic keeps as metadata or in a union."""
    validator = typing.get_args(alias)[1]
    inner = (part for one in typing.get_args(setting.field.annotation) for part in typing.get_args(one))
    return validator in (*setting.field.metadata, *inner)


def main() -> None:
    page = FilePath(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/configuration/settings.md")
    page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

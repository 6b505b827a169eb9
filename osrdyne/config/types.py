"""Base and field types of the configuration: durations, sizes and Spark settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from osrdyne.protocol.spark_master import shown_master

LONGEST = 2.0**63
"""Seconds; every duration is shorter."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)")
_ISO = re.compile(
    r"P(?:(?P<d>\d+(?:\.\d+)?)D)?(?:T(?:(?P<h>\d+(?:\.\d+)?)H)?(?:(?P<m>\d+(?:\.\d+)?)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?\Z",
    re.IGNORECASE,
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|[kK]B|MB|GB)?\Z")
_SPARK_SIZE = re.compile(
    r"(\d+(?:\.\d+)?)\s*([kmg])(?:i?b?)\Z", re.IGNORECASE
)  # as Spark, Java and Kubernetes write it
_SIZE_UNITS = {
    None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip

_KIBI = {"k": "KiB", "m": "MiB", "g": "GiB"}


class Model(BaseModel):
    """Base of all settings: frozen, and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


def parse_duration(value: object) -> object:
    """Seconds from `10s`, `1h30m`, `500ms`, `PT5M`, `2.5` or a number. Raises ValueError with the valid forms."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a duration such as 10s, 5m, 1h30m, PT5M or a number of seconds")
    if not isinstance(value, str):
        seconds = float(value) if abs(value) < LONGEST else float("inf")
    elif (number := re.fullmatch(r"\d+(?:\.\d+)?", value.strip())) is not None:
        seconds = float(number[0])
    elif (iso := _ISO.match(value.strip())) is not None and any(iso.groups()):
        seconds = sum(float(amount) * _UNITS[unit] for unit, amount in iso.groupdict().items() if amount)
    else:
        parts = _PART.findall(value)
        if not parts or _PART.sub("", value).strip():
            raise ValueError(f"{value!r} is not a duration; write 10s, 5m, 1h30m, PT5M or a number of seconds")
        seconds = sum(float(amount) * _UNITS[unit] for amount, unit in parts)
    # The same limit for texts and numbers: a duration parsed from a text is stored as a number and parsed again.
    if not 0 <= seconds < LONGEST:
        raise ValueError("a duration must be finite and not negative")
    return seconds


def duration_xml(seconds: float) -> str:
    """`10.0` as `PT10S`, a duration of XML Schema."""
    return f"PT{seconds:.6f}".rstrip("0").rstrip(".") + "S"


def parse_size(value: object) -> object:
    """Bytes from `16MiB`, `60 KiB`, `1000` or a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("must be a size such as 60KiB, 16MiB or a number of bytes")
    if isinstance(value, int):
        return value
    match = _SIZE.match(value.strip())
    if match is None:
        spark = _SPARK_SIZE.match(value.strip())
        right = "60KiB, 16MiB or a number of bytes" if spark is None else f"{spark[1]}{_KIBI[spark[2].lower()]}"
        raise ValueError(f"{value!r} is not a size; write {right}")
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if size >= 2**63:
        raise ValueError("a size must be less than 8 EiB")
    return int(size)


def size_text(size_bytes: int) -> str:
    """`16777216` as `16MiB`."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size and size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)


def duration_text(seconds: float) -> str:
    """`600.0` as `10m`: the longest unit that leaves a whole number."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


def _spark_text(value: Any) -> Any:
    """Convert numbers and booleans of a YAML file (`2`, `false`) to text: Spark accepts only text."""
    if not isinstance(value, dict):
        return value
    return {
        name: str(item).lower() if isinstance(item, bool) else str(item) if isinstance(item, int | float) else item
        for name, item in value.items()
    }


# Settings of Spark by name. Their values may be secrets.
SparkConf = Annotated[dict[str, str], BeforeValidator(_spark_text)]

# Seconds, as a float; accepts `10s`, `5m`, ISO 8601 and numbers.
Duration = Annotated[float, BeforeValidator(parse_duration)]

Size = Annotated[int, BeforeValidator(parse_size)]  # Bytes; accepts `16MiB` and numbers.


@dataclass(frozen=True, slots=True)
class PublicMarker:
    """Marks a free mapping whose values are never secret."""


@dataclass(frozen=True, slots=True)
class ShownBy:
    """Marks a text that may contain a secret; `show` returns the text without it."""

    show: Callable[[str], str]


# A master of Spark, whose parameters may contain a token.
MasterUri = Annotated[str, ShownBy(shown_master)]

# A free mapping whose values `check-config` shows; it hides the texts of other free mappings.
PublicMapping = Annotated[dict[str, Any], PublicMarker()]

PublicTexts = Annotated[dict[str, str], PublicMarker()]  # The same, with texts only.

"""The options of the source, parsed and checked. Pure: reads no file.

Options are part of Spark's plans, which Spark shows and logs, so none of them holds a credential.
Source: docs/reference/rabbitmq-stream-source.md.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from osrdyne.errors import ConfigurationError

Edge = Literal["earliest", "latest"]
MAX_STREAMS = 1_000
MAX_OFFSET = 2**63 - 1
MAX_PREFETCH = 65_535  # AMQP has 16 bits for it
MAX_NAME_BYTES = 255
NAMES = (
    "uriFile",
    "stream",
    "streams",
    "startingOffsets",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "maxOffsetsPerPartition",
    "failOnDataLoss",
    "prefetch",
    "timeout",
)
"""Spark ignores upper and lower case in the names of options."""
_CREDENTIALS = frozenset({"uri", "url", "user", "username", "password"})


@dataclass(frozen=True, slots=True)
class Position:
    """Where to begin or to end: offsets for the streams that have one, and `edge` for the others."""

    edge: Edge
    offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """All options. `streams` has the stream of `stream`, too; `timeout` is in seconds."""

    uri_file: str
    streams: tuple[str, ...]
    starting_offsets: Position
    ending_offsets: Position
    max_offsets_per_trigger: int | None
    max_offsets_per_partition: int
    fail_on_data_loss: bool
    prefetch: int
    timeout: int


def parse_options(given: Mapping[str, str]) -> Options:
    """Check all options. Raises `ConfigurationError` that names the option and the remedy."""
    options = {name.lower(): value for name, value in given.items()}
    _check_names(options)
    uri_file = options.get("urifile", "")
    if not uri_file or "://" in uri_file:
        raise ConfigurationError(
            "The option uriFile must be the path of a file with the AMQP URI of RabbitMQ on each host that reads."
        )
    streams = _streams(options)
    limited = "maxoffsetspertrigger" in options
    return Options(
        uri_file=uri_file,
        streams=streams,
        starting_offsets=_position(options, "startingOffsets", streams, "earliest"),
        ending_offsets=_position(options, "endingOffsets", streams, "latest"),
        max_offsets_per_trigger=_integer(options, "maxOffsetsPerTrigger", 1, MAX_OFFSET) if limited else None,
        max_offsets_per_partition=_integer(options, "maxOffsetsPerPartition", 1_000_000, MAX_OFFSET),
        fail_on_data_loss=_boolean(options, "failOnDataLoss", default=True),
        prefetch=_integer(options, "prefetch", 1_000, MAX_PREFETCH),
        timeout=_integer(options, "timeout", 60, 86_400),
    )


def _check_names(options: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in NAMES}
    for name in options:
        if name in _CREDENTIALS:
            raise ConfigurationError(
                f"The option {name} is refused: Spark shows options in plans and logs. Write the AMQP URI, with user "
                "and password, to a file and name it with the option uriFile."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {known[near[0]]}?" if near else f"it has {', '.join(NAMES)}."
            raise ConfigurationError(f"The source has no option {name}; {remedy}")


def _streams(options: Mapping[str, str]) -> tuple[str, ...]:
    if ("stream" in options) == ("streams" in options):
        raise ConfigurationError("Set one of the options stream (one name) and streams (a JSON array of names).")
    if "stream" in options:
        return (_checked_name(options["stream"], "stream"),)
    names = _json(options["streams"], "streams")
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_STREAMS:
        raise ConfigurationError(f'The option streams must be a JSON array of 1 to {MAX_STREAMS} names, as ["a", "b"].')
    checked = tuple(_checked_name(name, "streams") for name in names)
    if len(set(checked)) < len(checked):
        raise ConfigurationError("The option streams names a stream twice.")
    return checked


def _checked_name(name: object, option: str) -> str:
    if not isinstance(name, str) or not name or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise ConfigurationError(
            f"The option {option}: the name of a stream is a text of 1 to {MAX_NAME_BYTES} bytes, not {name!r:.300}."
        )
    return name


def _position(options: Mapping[str, str], name: str, streams: tuple[str, ...], default: Edge) -> Position:
    value = options.get(name.lower(), default)
    if value.lower() == "earliest":
        return Position("earliest")
    if value.lower() == "latest":
        return Position("latest")
    offsets = _json(value, name)
    if isinstance(offsets, int) and not isinstance(offsets, bool) and len(streams) == 1:
        offsets = {streams[0]: offsets}
    if not isinstance(offsets, dict):
        raise ConfigurationError(
            f'The option {name} must be earliest, latest, an offset (for one stream), or a JSON object as {{"a": 17}}.'
        )
    for stream, offset in offsets.items():
        if stream not in streams:
            raise ConfigurationError(f"The option {name} names the stream {stream!r}, which is not read.")
        if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= MAX_OFFSET:
            raise ConfigurationError(f"The option {name}: the offset of {stream!r} must be from 0 to {MAX_OFFSET}.")
    return Position(default, offsets)


def _integer(options: Mapping[str, str], name: str, default: int, most: int) -> int:
    value = options.get(name.lower(), str(default))
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:20]) <= most:
        raise ConfigurationError(f"The option {name} must be a whole number from 1 to {most}, not {value!r:.50}.")
    return int(value)


def _boolean(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = options.get(name.lower(), str(default)).lower()
    if value not in {"true", "false"}:
        raise ConfigurationError(f"The option {name} must be true or false, not {value!r:.50}.")
    return value == "true"


def _json(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigurationError(f"The option {option} is not valid JSON: {text!r:.300}") from None

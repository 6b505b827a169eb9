"""Parses a message of the log into events, or into the reasons why it is invalid. Pure.

Used by the ingest and the last-value reader. Source: docs/reference/telemetry/events.md.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, NoReturn

from osrdyne.protocol.rates import LARGEST_EVENT
from osrdyne.protocol.telemetry import ENQUEUED_HEADER

WHOLE_MESSAGE = -1
"""The number of an invalid message, in place of that of an event."""
KINDS = frozenset({"telemetry", "alarm", "event", "variable"})

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_END_OF_TIME = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND


class InvalidEventError(ValueError):
    """Why an event cannot be a row."""


class Event(NamedTuple):
    """One event. `number`: in the message, from 0; the column `index`. `ts`: microseconds since the epoch."""

    number: int
    series: str
    ts: int
    kind: str
    value: float | None
    value_text: str | None
    quality: str | None
    attributes: list[tuple[str, str | None]]


class InvalidEvent(NamedTuple):
    """An invalid event. `number` is `WHOLE_MESSAGE` if nothing of the message can be parsed."""

    number: int
    reason: str
    body: bytes


class ParsedMessage(NamedTuple):
    """The events of one message."""

    events: list[Event]
    invalid: list[InvalidEvent]


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def parse_message(body: bytes, *, encoding: str | None, enqueued: int | None) -> ParsedMessage:
    """Parse one message; never raises. `enqueued`: as returned by `enqueued_time`."""
    parsed = ParsedMessage([], [])
    try:
        found = _events(body, encoding)
    except (ValueError, RecursionError) as error:
        parsed.invalid.append(InvalidEvent(WHOLE_MESSAGE, _reason(error), body))
        return parsed
    is_large = len(body) > LARGEST_EVENT
    for index, event in enumerate(found):
        try:
            if is_large:
                _check_size(event)
            parsed.events.append(_event(index, event, enqueued))
        except InvalidEventError as error:
            parsed.invalid.append(InvalidEvent(index, str(error), _bytes(event)))
        except RecursionError as error:
            parsed.invalid.append(InvalidEvent(index, _reason(error), body))
    return parsed


def enqueued_time(sent: str | int | None, stamped: int | None) -> int | None:
    """When the ingress accepted a message, in microseconds since the epoch: by the header `ENQUEUED_HEADER`, else by
    the timestamp of the message."""
    if isinstance(sent, str):
        sent = int(sent) if sent.isascii() and sent.isdigit() and len(sent) < 16 else None
    found = stamped if sent is None else sent * 1000
    return found if found is not None and 0 <= found <= _END_OF_TIME else None


def _event(index: int, event: Any, enqueued: int | None) -> Event:
    """Parse one event. Raises `InvalidEventError` and RecursionError."""
    if type(event) is not dict:
        raise InvalidEventError("the event is not a JSON object")
    if enqueued is None:
        raise InvalidEventError(f"the message has no time: neither the header {ENQUEUED_HEADER} nor a timestamp")
    fields = event.copy()  # `event` is kept whole if it is invalid
    series = fields.pop("series", None)
    if type(series) is not str or not series:
        raise InvalidEventError("series must be a text that is not empty")
    kind = fields.pop("kind", "telemetry")
    if type(kind) is not str or kind not in KINDS:
        raise InvalidEventError(f"kind must be one of {', '.join(sorted(KINDS))}")
    ts = fields.pop("ts", None)
    time = enqueued if ts is None else _microseconds(ts)
    value, text = _value(fields.pop("value", None))
    quality = fields.pop("quality", None)
    if quality is not None and type(quality) is not str:
        if type(quality) is not int:
            raise InvalidEventError("quality must be a text or an integer")
        quality = str(quality)
    attributes = fields.pop("attributes", None)
    if attributes is not None:
        if type(attributes) is not dict:
            raise InvalidEventError("attributes must be a JSON object")
        fields |= attributes
    items = [(_text(name), _attribute(item)) for name, item in fields.items()] if fields else []
    return Event(index, _text(series), time, kind, value, text, None if quality is None else _text(quality), items)


def _events(body: bytes, encoding: str | None) -> list[Any]:
    """Decode the events of a message. Raises ValueError and RecursionError."""
    if encoding not in (None, "", "identity", "utf-8"):
        raise InvalidEventError(f"the content encoding {encoding[:40]} is not supported; send JSON without it")
    document = _decode(body.decode("utf-8"))
    if type(document) is list:
        return document
    if type(document) is not dict:
        raise InvalidEventError("the message is neither a JSON object nor an array")
    events = document.get("events")
    return events if type(events) is list else [document]


def _reason(error: ValueError | RecursionError) -> str:
    match error:
        case InvalidEventError():
            return str(error)
        case UnicodeDecodeError():
            return f"the message is not UTF-8: byte {error.start}"
        case json.JSONDecodeError():
            return f"the message is not JSON: {error.msg}, character {error.pos}"
        case RecursionError():
            return "the message is nested too deeply"
        case _:
            return f"the message is not JSON: {str(error)[:100]}"


def _check_size(event: Any) -> None:
    """Check the size of an event as compact JSON: its message may contain others."""
    size = len(_bytes(event))
    if size > LARGEST_EVENT:
        raise InvalidEventError(f"the event has {size} bytes; at most {LARGEST_EVENT} are allowed")


def _bytes(event: Any) -> bytes:
    return _encode(event).encode("utf-8", "replace")


def _microseconds(ts: object) -> int:
    """The time of an event in microseconds since the epoch."""
    if type(ts) is str:
        try:
            when = datetime.fromisoformat(ts)
        except ValueError:
            raise InvalidEventError("ts is not a time in ISO 8601, such as 2026-11-22T10:00:00.5Z") from None
        found = ((when if when.tzinfo is not None else when.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
    elif type(ts) is int or (type(ts) is float and math.isfinite(ts * 1000)):
        found = int(ts * 1000)
    else:
        raise InvalidEventError("ts must be a text in ISO 8601, or a number of milliseconds since 1970")
    if not 0 <= found <= _END_OF_TIME:
        raise InvalidEventError("ts must be between the years 1970 and 9999")
    return found


def _value(value: object) -> tuple[float | None, str | None]:
    """A value as a number, or as a text."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise InvalidEventError("value is too large for a number of 64 bits")
        return number, None
    if value is None:
        return None, None
    if type(value) is str:
        return None, _text(value)
    raise InvalidEventError("value must be a number, a text, true, false or null")


def _attribute(value: object) -> str | None:
    """The text of an attribute; JSON for any other type."""
    if value is None:
        return None
    return _text(value) if type(value) is str else _text(_encode(value))


def _text(text: str) -> str:
    """Replace unpaired surrogates: Arrow and Parquet accept only text that is UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()

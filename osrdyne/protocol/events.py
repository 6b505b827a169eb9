"""Parses a message of the log into events, or into the reasons why it is invalid. Pure.

Used by the ingest and the last-value reader. Source: docs/reference/telemetry/events.md.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from osrdyne.protocol.event_mapping import AUTO, EVENTS, UNITS, EventMapping, MappingError
from osrdyne.protocol.rates import LARGEST_EVENT
from osrdyne.protocol.telemetry import ENQUEUED_HEADER

WHOLE_MESSAGE = -1
"""The number of an invalid message, in place of that of an event."""
KINDS = frozenset({"telemetry", "alarm", "event", "variable"})

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_END_OF_TIME = (datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_YEAR = 365 * 86_400 * 1_000_000
_FIRST_LIKELY = 10**15
"""September 2001, in microseconds: as a number in another unit, an earlier time is not recognised."""
_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_LONGEST = (("s", 10**11), ("ms", 10**14), ("us", 10**17))
"""With the unit `auto`: the unit of numbers below each limit; it is in the year 5138 of its unit."""
_ROLLED = re.compile(
    r"(?P<date>[^T ]+[T ])(?:24:00(?::00(?:\.0+)?)?|(?P<minute>\d\d:\d\d):60(?:\.\d+)?)(?P<zone>\D.*)?"
)
"""A leap second (RFC 3339), or the end of a day (ISO 8601)."""


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


def _integer(text: str) -> int | float:
    """An integer; Python refuses to read more than some thousand digits."""
    try:
        return int(text)
    except ValueError:
        return math.inf


# NaN and integers that cannot be read are numbers here, so that only their events are invalid.
_decode = json.JSONDecoder(parse_constant=float).decode
_decode_long = json.JSONDecoder(parse_constant=float, parse_int=_integer).decode  # several times slower
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_strictly = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def parse_message(
    body: bytes, *, encoding: str | None, enqueued: int | None, mapping: EventMapping = EVENTS
) -> ParsedMessage:
    """Parse one message; never raises. `enqueued`: as returned by `enqueued_time`."""
    parsed = ParsedMessage([], [])
    try:
        found = _events(body, encoding, enqueued, mapping)
    except (ValueError, RecursionError) as error:
        parsed.invalid.append(InvalidEvent(WHOLE_MESSAGE, _reason(error), body))
        return parsed
    is_large = len(body) > LARGEST_EVENT
    for index, event in enumerate(found):
        try:
            if is_large:
                _check_size(event)
            parsed.events.append(_event(index, event, enqueued, mapping.ts_unit))
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


def _event(index: int, event: Any, enqueued: int | None, unit: str | None) -> Event:
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
    time = enqueued if ts is None else _microseconds(ts, unit, enqueued)
    value, text = _value(fields.pop("value", None))
    quality = fields.pop("quality", None)
    if quality is not None and type(quality) is not str:
        if type(quality) is not int and not (type(quality) is float and quality.is_integer()):
            raise InvalidEventError("quality must be a text or an integer")
        quality = str(int(quality))
    attributes = fields.pop("attributes", None)
    if attributes is not None:
        if type(attributes) is not dict:
            raise InvalidEventError("attributes must be a JSON object")
        fields |= attributes
    items = [(_text(name), _attribute(name, item)) for name, item in fields.items()] if fields else []
    return Event(index, _text(series), time, kind, value, text, None if quality is None else _text(quality), items)


def _events(body: bytes, encoding: str | None, enqueued: int | None, mapping: EventMapping) -> Iterable[Any]:
    """Decode the events of a message. Raises ValueError and RecursionError."""
    if encoding not in (None, "", "identity", "utf-8"):
        raise InvalidEventError(f"the content encoding {encoding[:40]} is not supported; send JSON without it")
    text = body.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    try:
        document = _decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        document = _decode_long(text)
    # A list: an error in a later record must not be raised after events of the message were parsed.
    return mapping.elements(document)[0] if mapping.is_identity else list(mapping.apply(document, enqueued))


def _reason(error: ValueError | RecursionError) -> str:
    match error:
        case InvalidEventError() | MappingError():
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


def _microseconds(ts: object, unit: str | None, enqueued: int) -> int:
    """The time of an event in microseconds since the epoch. `unit`: as in `EventMapping.ts_unit`."""
    if type(ts) is str:
        found = _time_of(ts)
    elif type(ts) is int or (type(ts) is float and math.isfinite(ts * 1_000_000)):
        if unit is None:
            found = int(ts * 1000)
            if not -_YEAR < found - enqueued < _YEAR:
                _check_unit(ts, enqueued)
        else:
            found = _in_unit(ts, _likely_unit(ts) if unit == AUTO else unit)
    else:
        raise InvalidEventError("ts must be a text in ISO 8601, or a number of milliseconds since 1970")
    if not 0 <= found <= _END_OF_TIME:
        raise InvalidEventError("ts must be between the years 1970 and 9999")
    return found


def _likely_unit(number: int | float) -> str:
    return next((unit for unit, limit in _LONGEST if abs(number) < limit), "ns")


def _in_unit(number: int | float, unit: str) -> int:
    nanoseconds = UNITS[unit]
    return round(number * (nanoseconds // 1000)) if nanoseconds >= 1000 else int(number // 1000)


def _check_unit(ts: int | float, enqueued: int) -> None:
    """Refuse a number that is a likely time in another unit than milliseconds: stored in silence, seconds of today are
    in January 1970. `enqueued`: no device sends times much later than the arrival."""
    for unit in UNITS:
        if unit != "ms" and _FIRST_LIKELY <= _in_unit(ts, unit) <= enqueued + _YEAR:
            raise InvalidEventError(
                f"ts looks like {_UNIT_NAMES[unit]} since 1970, but milliseconds are expected; set ts_unit in mapping"
            )


def _time_of(text: str) -> int:
    """A time in ISO 8601 or RFC 3339. A leap second is the second after it."""
    upper = text.upper()
    try:
        try:
            when, added = datetime.fromisoformat(upper), timedelta()
        except ValueError:
            rolled = _ROLLED.fullmatch(upper)
            if rolled is None:
                raise
            date, minute, zone = rolled["date"], rolled["minute"], rolled["zone"] or ""
            clock, added = ("00:00", timedelta(days=1)) if minute is None else (minute, timedelta(minutes=1))
            when = datetime.fromisoformat(f"{date}{clock}{zone}")
    except ValueError:
        raise InvalidEventError("ts is not a time in ISO 8601, such as 2026-11-22T10:00:00.5Z") from None
    return ((when if when.tzinfo is not None else when.replace(tzinfo=UTC)) - _EPOCH + added) // _MICROSECOND


def _value(value: object) -> tuple[float | None, str | None]:
    """A value as a number, or as a text."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        if math.isnan(number):
            raise InvalidEventError("value is NaN, which JSON does not have; send null")
        if not math.isfinite(number):
            raise InvalidEventError("value is too large for a number of 64 bits")
        return number, None
    if value is None:
        return None, None
    if type(value) is str:
        return None, _text(value)
    raise InvalidEventError("value must be a number, a text, true, false or null")


def _attribute(name: str, value: object) -> str | None:
    """The text of an attribute; JSON for any other type."""
    if value is None:
        return None
    if type(value) is str:
        return _text(value)
    try:
        return _text(_encode_strictly(value))
    except ValueError:
        raise InvalidEventError(f"the attribute {name[:40]} has NaN or a number that is too large") from None


def _text(text: str) -> str:
    """Replace unpaired surrogates: Arrow and Parquet accept only text that is UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()

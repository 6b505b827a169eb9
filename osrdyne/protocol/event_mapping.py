"""How the messages of devices become events: names of fields, and forms that have more than one event in an object.

Used by the parser of events, for tables and last values with the setting `mapping`. Pure.
Source: docs/reference/telemetry/event-mapping.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

FIELDS = ("series", "ts", "kind", "value", "quality", "attributes")
"""The fields of an event."""
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""Nanoseconds of each unit of `ts`."""
AUTO = "auto"
"""The unit of each number follows from its size."""
_SHARED_CHARACTERS = 512
"""The longest text that several events share: without a limit a small message would become a large table."""
_RELATIVE = 2**28
"""Seconds: a smaller time of SenML counts from the arrival (RFC 8428, 4.5.3)."""
_SENML_VALUES = ("v", "vs", "vb", "vd")


class MappingError(ValueError):
    """A message does not have the form of its mapping."""


class Form(StrEnum):
    """`events`: an object is an event. `flat`: each field of an object is one. `senml`: RFC 8428."""

    EVENTS = "events"
    FLAT = "flat"
    SENML = "senml"


_SETTINGS = {
    Form.EVENTS: frozenset({*FIELDS, "events", "message_ts", "ts_unit"}),
    Form.FLAT: frozenset({"ts", "events", "message_ts", "values", "ts_unit"}),
    Form.SENML: frozenset({"ts_unit"}),
}
"""The settings of each form, next to `preset`."""


@dataclass(frozen=True, slots=True)
class EventMapping:
    """The form and the names of fields in messages. `events`: the field with the list of events. `message_ts`: the
    field beside it with the time of events that have none. `values`: of `flat`, the field with the object of values.
    `ts_unit`: of numbers; None: milliseconds, and numbers that look like another unit are refused."""

    form: Form = Form.EVENTS
    names: Mapping[str, str] = field(default_factory=lambda: {name: name for name in FIELDS})
    events: str = "events"
    message_ts: str | None = None
    values: str | None = None
    ts_unit: str | None = None

    @property
    def is_identity(self) -> bool:
        """Whether the objects of a message are its events as they are."""
        return self.form is Form.EVENTS and self.message_ts is None and all(a == b for a, b in self.names.items())

    def elements(self, document: Any) -> tuple[list[Any], Any]:
        """The objects of a message, and the time that they share. Raises `MappingError`."""
        if type(document) is list:
            return document, None
        if type(document) is not dict:
            raise MappingError("the message is neither a JSON object nor an array")
        found = document.get(self.events)
        if type(found) is not list:
            return [document], None
        return found, None if self.message_ts is None else document.get(self.message_ts)

    def apply(self, document: Any, enqueued: int | None) -> Iterable[Any]:
        """The events of a message, with the fields `FIELDS` only; what is no object is returned as it is. `enqueued`:
        when the message arrived, in microseconds since the epoch. Raises `MappingError`."""
        if self.form is Form.SENML:
            return _senml(document if type(document) is list else [document], enqueued)
        elements, ts = self.elements(document)
        return self._flat(elements, ts) if self.form is Form.FLAT else self._renamed(elements, ts)

    def _renamed(self, elements: Iterable[Any], shared_ts: Any) -> Iterator[Any]:
        for element in elements:
            if type(element) is not dict:
                yield element
                continue
            rest = element.copy()
            event = {ours: rest.pop(theirs) for ours, theirs in self.names.items() if theirs in rest}
            if event.get("ts") is None:
                event["ts"] = _shared(shared_ts)
            attributes = event.get("attributes")
            if rest and (attributes is None or type(attributes) is dict):
                event["attributes"] = rest | (attributes or {})
            yield event

    def _flat(self, elements: Iterable[Any], shared_ts: Any) -> Iterator[Any]:
        name_of_ts = self.names["ts"]
        for element in elements:
            if type(element) is not dict:
                yield element
                continue
            ts = _shared(shared_ts if element.get(name_of_ts) is None else element[name_of_ts])
            inner = None if self.values is None else element.get(self.values)
            for name, value in (inner if type(inner) is dict else element).items():
                if inner is not None or name != name_of_ts:
                    yield {"series": name, "ts": ts, "value": value}


EVENTS = EventMapping()
"""The form of docs/reference/telemetry/events.md."""

PRESETS: Mapping[str, EventMapping] = {
    "osrdyne": EVENTS,
    "pascal-case": EventMapping(names={name: name.capitalize() for name in FIELDS}, events="Events"),
    "flat": EventMapping(Form.FLAT),
    "thingsboard": EventMapping(Form.FLAT, values="values"),
    "senml": EventMapping(Form.SENML, ts_unit="s"),
    "sparkplug": EventMapping(
        names={**EVENTS.names, "series": "name", "ts": "timestamp"},
        events="metrics",
        message_ts="timestamp",
    ),
}
"""Mappings for messages that devices and gateways often send."""


def mapping_from_settings(settings: Mapping[str, str]) -> EventMapping:
    """The mapping of a setting: a preset, and what differs from it. Raises ValueError."""
    changes = dict(settings)
    preset = changes.pop("preset", "osrdyne")
    if preset not in PRESETS:
        raise ValueError(f"the preset {preset!r} does not exist; there are {', '.join(PRESETS)}")
    mapping = PRESETS[preset]
    known = _SETTINGS[mapping.form]
    if unknown := sorted(changes.keys() - known):
        raise ValueError(f"the preset {preset} has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
    unit = changes.get("ts_unit", AUTO)
    if unit != AUTO and unit not in UNITS:
        raise ValueError(f"ts_unit is {unit!r}; it must be one of {AUTO}, {', '.join(UNITS)}")
    names = {name: changes.pop(name) for name in FIELDS if name in changes}
    return replace(mapping, names={**mapping.names, **names}, **changes)  # type: ignore[arg-type]


def _shared(ts: Any) -> Any:
    """A time that several events have. What is no time is cut, because it is repeated for each of them."""
    if type(ts) is str:
        return ts[:_SHARED_CHARACTERS]
    return ts if ts is None or type(ts) in (int, float) else False


def _senml(records: Iterable[Any], enqueued: int | None) -> Iterator[Any]:
    """Resolve the base values of SenML (RFC 8428, 4.6). Raises `MappingError`."""
    base: dict[str, Any] = {}
    for record in records:
        if type(record) is not dict:
            yield record
            continue
        rest = record.copy()
        for name in ("bn", "bt", "bu", "bv", "bs", "bver"):
            if name in rest:
                base[name] = _base(name, rest.pop(name))
        if not rest:
            continue  # base values only
        event: dict[str, Any] = {
            "series": _concatenated(base.get("bn"), rest.pop("n", None)),
            "ts": _senml_time(_sum(base.get("bt"), rest.pop("t", None)), enqueued),
        }
        found = [name for name in _SENML_VALUES if name in rest]
        if found:
            value = rest.pop(found[0])
            event["value"] = _sum(base.get("bv"), value) if found[0] == "v" else value
        if "bu" in base:
            rest.setdefault("u", base["bu"])
        if rest:
            event["attributes"] = rest
        yield event


def _base(name: str, value: Any) -> Any:
    if type(value) not in (str, int, float) or (type(value) is str and len(value) > _SHARED_CHARACTERS):
        raise MappingError(f"{name} must be a number, or a text of at most {_SHARED_CHARACTERS} characters")
    return value


def _concatenated(base: Any, name: Any) -> Any:
    """The name of a record; what is no text is kept, so that it is named as invalid."""
    if base is None or name is None:
        return base if name is None else name
    return base + name if type(base) is str and type(name) is str else None


def _sum(base: Any, value: Any) -> Any:
    """A base value and a value; what is no number is kept, so that it is named as invalid."""
    if base is None or value is None:
        return base if value is None else value
    if type(value) not in (int, float):
        return value
    if type(base) not in (int, float):
        return base
    try:
        return base + value
    except OverflowError:
        return math.inf


def _senml_time(ts: Any, enqueued: int | None) -> Any:
    """The time of a record in seconds. A small number counts from the arrival; without a time it is the arrival."""
    if type(ts) in (int, float) and abs(ts) < _RELATIVE and enqueued is not None:
        return enqueued / 1_000_000 + ts
    return ts

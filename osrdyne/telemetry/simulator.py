"""Messages of simulated devices, computed from a seed. Pure: no clock, no connection.

The same `Simulation` gives the same bytes on every machine and at every speed. Used by
`osrdyne telemetry simulate`, by demos and by tests. See docs/how-to/simulate-devices.md.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from random import Random

from osrdyne.protocol.names import parse_key
from osrdyne.protocol.rates import LARGEST_EVENT

MAX_DEVICES = 100_000
MIN_EVENT_BYTES = 256
"""Enough for the fields of any event."""
MAX_EVENT_BYTES = 1024 * 1024
MAX_EVENTS = 10_000
MAX_START_MS = 250_000_000_000_000
"""In the year 9892; events may be until the end of 9999."""
OVERSIZED_BYTES = LARGEST_EVENT + 1024
DEFAULT_KEY = "{site}/{device}"
LEVEL_HEADER = "level"
"""Header of alarms, with the value `alarm`, for conditions of routes: `WHERE level = 'alarm'`."""

_MINUTE = 60_000_000  # Microseconds.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class MessageKind(StrEnum):
    """The kind of a message; each message has one kind."""

    TELEMETRY = "telemetry"
    ALARM = "alarm"
    LATE = "late"
    OUT_OF_ORDER = "out-of-order"
    DUPLICATE = "duplicate"
    INVALID = "invalid"
    OVERSIZED = "oversized"


@dataclass(frozen=True, slots=True)
class Series:
    """A measured value: a random walk between two bounds, with steps of at most `step`."""

    name: str
    low: float
    high: float
    step: float

    def first(self, random: Random) -> float:
        return self.low + (self.high - self.low) * random.random()

    def next(self, value: float, random: Random) -> float:
        """The next value; a step across a bound is reflected there."""
        value += self.step * (2 * random.random() - 1)
        if value > self.high:
            value = 2 * self.high - value
        return 2 * self.low - value if value < self.low else value


SERIES = (
    Series("temperature", 15.0, 95.0, 0.4),
    Series("pressure", 1.0, 10.0, 0.05),
    Series("vibration", 0.0, 20.0, 0.3),
    Series("flow", 0.0, 500.0, 4.0),
    Series("speed", 0.0, 3000.0, 25.0),
)
"""The series of every device. The bounds are far larger than a step, so that one reflection is enough."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The devices and their messages. Rates are messages a minute of all devices together; shares are from 0 to 1.

    - `start_ms`: time of the first message, in milliseconds since the epoch; `duration`: seconds.
    - `events`: events in one message, on average; `event_bytes`: size of each event as JSON, None for no padding.
    - `key`: `{site}` and `{device}` in it are replaced.
    - `alarms_a_minute`: messages with one alarm, in addition to `messages_a_minute`.
    - `late`: share of messages whose events happened up to `late_by` seconds before they are sent.
    - `out_of_order`: share of messages that are sent after the next message of their device.
    - `clock_skew`: the largest error of the clock of a device, in seconds; constant for each device.
    - `duplicates`: share of messages that are sent twice, with one message id.
    - `invalid`, `oversized`: share of messages whose JSON is cut off, or whose first event has 33 KiB.

    Raises ValueError, which names the field, and `InvalidKeyError`.
    """

    devices: int = 50
    sites: int = 1
    messages_a_minute: Fraction = Fraction(60)
    events: Fraction = Fraction(1)
    event_bytes: int | None = None
    duration: Fraction = Fraction(60)
    seed: int = 1
    start_ms: int = 0
    key: str = DEFAULT_KEY
    alarms_a_minute: Fraction = Fraction(0)
    late: float = 0.0
    late_by: float = 600.0
    out_of_order: float = 0.0
    clock_skew: float = 0.0
    duplicates: float = 0.0
    invalid: float = 0.0
    oversized: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MAX_DEVICES:
            raise ValueError(f"devices: must be from 1 to {MAX_DEVICES}")
        if not 1 <= self.sites <= self.devices:
            raise ValueError("sites: must be from 1 to the number of devices")
        if not 1 <= self.events <= MAX_EVENTS:
            raise ValueError(f"events: must be from 1 to {MAX_EVENTS}")
        if self.event_bytes is not None and not MIN_EVENT_BYTES <= self.event_bytes <= MAX_EVENT_BYTES:
            raise ValueError(f"size: must be from {MIN_EVENT_BYTES} to {MAX_EVENT_BYTES} bytes")
        if self.start_ms > MAX_START_MS:
            raise ValueError("start: must be before the year 9892")
        for name in ("messages_a_minute", "alarms_a_minute", "duration", "late_by", "clock_skew", "start_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name.removesuffix('_ms')}: must not be negative")
        for name in ("late", "out_of_order", "duplicates", "invalid", "oversized"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be a share from 0 to 1")
        parse_key(self.key_of(self.devices - 1))

    def key_of(self, device: int) -> str:
        return self.key.replace("{site}", self.site_of(device)).replace("{device}", self.name_of(device))

    def name_of(self, device: int) -> str:
        return f"device-{device + 1:0{len(str(self.devices))}d}"

    def site_of(self, device: int) -> str:
        return f"site-{device % self.sites + 1:0{len(str(self.sites))}d}"


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """A message. `at_us`: when it is sent, in microseconds after the start. `events`: the number of its events, also of
    an invalid message. A duplicate of an alarm is an alarm as well."""

    at_us: int
    device: int
    key: str
    message_id: str
    body: bytes
    events: int
    kind: MessageKind
    is_alarm: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {LEVEL_HEADER: "alarm"} if self.is_alarm else {}


def simulate(simulation: Simulation) -> Iterator[SimulatedMessage]:
    """The messages in the order of sending. Memory grows with the number of devices only."""
    random = Random(f"{simulation.seed}/order")
    held: dict[int, SimulatedMessage] = {}
    last = 0
    for message in _Devices(simulation).messages():
        last = message.at_us
        is_held, is_copied = (random.random() < share for share in (simulation.out_of_order, simulation.duplicates))
        if is_held and message.kind is MessageKind.TELEMETRY and message.device not in held:
            held[message.device] = replace(message, kind=MessageKind.OUT_OF_ORDER)
            continue
        yield message
        if is_copied:
            yield replace(message, kind=MessageKind.DUPLICATE)
        if (earlier := held.pop(message.device, None)) is not None:
            yield replace(earlier, at_us=message.at_us)
    for earlier in held.values():
        yield replace(earlier, at_us=last)


class _Devices:
    """Generates the messages in the order of their time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        # One generator for each purpose, so that an option does not change the effects of the others.
        self._walks, self._faults, self._alarms = (
            Random(f"{simulation.seed}/{purpose}") for purpose in ("walks", "faults", "alarms")
        )
        clocks, skew = Random(f"{simulation.seed}/clocks"), round(1000 * simulation.clock_skew)
        self._skews = [round(skew * (2 * clocks.random() - 1)) for _ in range(simulation.devices)]
        self._values: dict[int, list[float]] = {}
        self._next_series = [0] * simulation.devices
        self._prefix = f"sim-{simulation.seed}-{simulation.start_ms:x}"

    def messages(self) -> Iterator[SimulatedMessage]:
        telemetry = ((at, 0, number) for number, at in _times(self._simulation.messages_a_minute, self._simulation))
        alarms = ((at, 1, number) for number, at in _times(self._simulation.alarms_a_minute, self._simulation))
        for at, is_alarm, number in heapq.merge(telemetry, alarms):
            yield self._alarm(number, at) if is_alarm else self._telemetry(number, at)

    def _telemetry(self, number: int, at: int) -> SimulatedMessage:
        simulation = self._simulation
        device = number % simulation.devices
        draws = [self._faults.random() for _ in range(4)]
        shares = (simulation.invalid, simulation.oversized, simulation.late)
        kinds = (MessageKind.INVALID, MessageKind.OVERSIZED, MessageKind.LATE)
        found = (kind for kind, share, draw in zip(kinds, shares, draws, strict=False) if draw < share)
        kind = next(found, MessageKind.TELEMETRY)
        ts = self._timestamp(device, at)
        if kind is MessageKind.LATE:
            ts -= round(1000 * simulation.late_by * draws[3])
        count = int((number + 1) * simulation.events) - int(number * simulation.events)
        # The samples of a message are a millisecond apart: a series may occur more than once.
        events = [self._sample(device, ts - (count - 1 - index)) for index in range(count)]
        sizes = [simulation.event_bytes] * count
        if kind is MessageKind.OVERSIZED:
            sizes[0] = OVERSIZED_BYTES
        texts = [_padded(event, size) for event, size in zip(events, sizes, strict=True)]
        body = (texts[0] if count == 1 else f'{{"events":[{",".join(texts)}]}}').encode()
        if kind is MessageKind.INVALID:
            body = body[: int(1 + (len(body) - 1) * draws[3])]
        return self._message(device, at, f"{self._prefix}-{number}", body, count, kind)

    def _alarm(self, number: int, at: int) -> SimulatedMessage:
        device = int(self._alarms.random() * self._simulation.devices)
        series = SERIES[0]
        event = {
            "series": series.name,
            "ts": max(0, self._timestamp(device, at)),
            "kind": "alarm",
            "value": round(series.high + 20 * self._alarms.random(), 2),
            "device": self._simulation.name_of(device),
            "limit": series.high,
        }
        body = _padded(event, self._simulation.event_bytes).encode()
        return self._message(device, at, f"{self._prefix}-a{number}", body, 1, MessageKind.ALARM)

    def _message(
        self, device: int, at: int, message_id: str, body: bytes, events: int, kind: MessageKind
    ) -> SimulatedMessage:
        key = self._simulation.key_of(device)
        return SimulatedMessage(at, device, key, message_id, body, events, kind, kind is MessageKind.ALARM)

    def _timestamp(self, device: int, at: int) -> int:
        return self._simulation.start_ms + at // 1000 + self._skews[device]

    def _sample(self, device: int, ts: int) -> dict[str, object]:
        """The next value of a device, whose series take turns."""
        values = self._values.get(device)
        if values is None:
            values = self._values[device] = [series.first(self._walks) for series in SERIES]
        place = self._next_series[device]
        self._next_series[device] = (place + 1) % len(SERIES)
        values[place] = SERIES[place].next(values[place], self._walks)
        return {
            "series": SERIES[place].name,
            "ts": max(0, ts),
            "value": round(values[place], 3),
            "device": self._simulation.name_of(device),
        }


def _times(messages_a_minute: Fraction, simulation: Simulation) -> Iterator[tuple[int, int]]:
    """Numbers and times of evenly spaced messages, without accumulated rounding errors."""
    count = -(-messages_a_minute * simulation.duration // 60)  # Those before the end, rounded up.
    for number in range(int(count)):
        yield number, number * _MINUTE * messages_a_minute.denominator // messages_a_minute.numerator


def _padded(event: dict[str, object], size: int | None) -> str:
    """The event as JSON without white space, with exactly this many bytes."""
    text = _encode(event)
    if size is None:
        return text
    filled = _encode({**event, "padding": ""})
    return filled[:-2] + "x" * (size - len(filled)) + filled[-2:]

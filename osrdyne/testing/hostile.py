"""Hostile messages, which any client may publish to a queue of a pool: everything that RabbitMQ accepts.

Each message is derived from a number, so that a failure names the message that caused it. It consists of bytes as on
the wire, because client libraries cannot produce many of these messages. `decoded` is the message as our code reads it;
`properties` are copied into a frame unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from random import Random

from pamqp import commands as spec

import osrdyne.amqp  # noqa: F401  (its patches of pamqp decode these messages)
from osrdyne.amqp import Message
from osrdyne.protocol.names import KEY_ARGUMENT

MAX_PROPERTIES_BYTES = 130_000
"""All properties of a message are in one frame of 128 KiB."""
LARGE = 60_000
DEEP = 2_000

WORDS: tuple[bytes, ...] = (
    b"",
    b"0",
    b"-1",
    b"5000",
    b"9" * 200,
    b"a",
    b"b",
    b"ok",
    b"expired",
    b"delivery_limit",
    b"rejected",
    b"ready",
    b"busy",
    b"failed",
    b"request-received",
    b"cancel",
    b"guest",
    b"worker-1",
    b"/echo",
    b"/typed",
    b"gzip",
    b"amq.rabbitmq.reply-to",
    b"amq.rabbitmq.reply-to.g1h2AA==.bm93aGVyZQ==",
    b"no-such-queue",
    b"{0}{x}%s%n$(id)",
    b"\r\n\0\x1b[31m",
    "漢🚄é".encode(),
    b"\xff\xfe\x80",
    b"\xed\xa0\x80",
    b"\xc3",
    b"x" * 255,
)
"""Short strings: names, numbers, statuses and events, also where they are not valid, and bytes that are not text."""
HEADERS: tuple[bytes, ...] = (
    b"x-rpc-path",
    b"x-deadline",
    b"x-no-activate",
    b"x-osrdyne-hops",
    b"x-osrdyne-replay",
    b"x-delivery-count",
    b"x-death",
    b"x-first-death-reason",
    b"x-first-death-queue",
    b"x-event",
    b"x-worker-id",
    b"x-status",
    b"x-status-detail",
    b"x-code",
    b"x-retry-after",
    b"x-non-terminating-response",
    b"accept",
    b"authorization",
    b"traceparent",
    b"CC",
    b"BCC",
    b"x-osrdyne-poison-key",
    b"x-osrdyne-poison-id",
    b"x-osrdyne-poison-deaths",
    b"x-osrdyne-poison-last-ms",
    KEY_ARGUMENT.encode(),
    b"",
    b"x\xff",
)
BODIES: tuple[bytes, ...] = (
    b"",
    b"{}",
    b"null",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"1" * 10_000,
    b'{"query": 1, "limit": 1e400}',
    b'{"in_flight": -1, "requests": [1, "x"], "reason": {}, "paused": "yes"}',
    b'{"in_flight": 1e400, "requests": "all"}',
    b'{"term": 1e400, "host": [1]}',
    b'{"term": -5}',
    b'{"term": "12", "host": null}',
    b'{"command": "pause", "generation": [-1, -1]}',
    b'{"command": "resume", "generation": [1e400, true]}',
    b'{"command": "queues", "generation": [1, 1], "queues": [1, null, ""]}',
    b'{"command": "cancel", "generation": [1, 1], "correlation_id": [], "reply_to": {}}',
    b'{"command": ["cancel"], "generation": "1.1"}',
    b'"\\ud800"',
    b"x" * 300_000,
)


@dataclass(frozen=True, slots=True)
class HostileMessage:
    """`properties`: the flags and fields of a content header, as bytes."""

    number: int
    routing_key: bytes
    properties: bytes
    body: bytes

    def decoded(self) -> tuple[str, WireMessage]:
        """The routing key and the message as our consumers get them."""
        read = spec.Basic.Properties()
        (flags,) = struct.unpack_from(">H", self.properties)
        read.unmarshal(flags, self.properties[2:])
        message = WireMessage(body=self.body, headers=read.headers or {}, read=read)
        return self.routing_key.decode("utf-8", "surrogateescape"), message


@dataclass(frozen=True, slots=True)
class WireMessage(Message):
    """A message with every property on the wire, also those that we never send."""

    read: spec.Basic.Properties = field(default_factory=spec.Basic.Properties)

    def properties(self) -> spec.Basic.Properties:
        properties = copy(self.read)
        properties.headers = dict(self.headers)  # type: ignore[arg-type]
        return properties


def hostile_message(number: int, *, keys: Iterable[bytes] = (), user: bytes | None = None) -> HostileMessage:
    """The message of this number. `keys`: frequent routing keys, besides odd ones. `user`: the publisher on a real
    broker, which refuses most messages with another `user-id`, or an odd `expiration` or `delivery-mode`."""
    random = Random(number)
    key = random.choice([*keys] * 3 or WORDS) if random.random() < 0.7 else _short(random)
    while len(properties := _properties(random, user)) > MAX_PROPERTIES_BYTES:
        pass
    body = random.choice(BODIES) if random.random() < 0.9 else random.randbytes(random.randrange(200))
    return HostileMessage(number, key, properties, body)


def _properties(random: Random, user: bytes | None) -> bytes:
    """Random properties: each field with a probability of one half, in the order of the protocol."""
    modes = (0, 1, 2, 255) if user is None else (1, 2)
    expirations = WORDS if user is None else (b"0", b"5000", b"4294967295")
    users = WORDS if user is None else (user,)
    fields: list[Callable[[Random], bytes]] = [
        _short_string,  # content-type
        _short_string,  # content-encoding
        _headers,
        lambda random: bytes([random.choice(modes)]),
        lambda random: bytes([random.randrange(256)]),  # priority
        _short_string,  # correlation-id
        _short_string,  # reply-to
        lambda random: _counted(random.choice(expirations)),
        _short_string,  # message-id
        lambda random: struct.pack(">Q", random.choice((0, 1_700_000_000, 1_700_000_000_000, 2**63, 2**64 - 1))),
        _short_string,  # type
        lambda random: _counted(random.choice(users)),
        _short_string,  # app-id
    ]
    flags, parts = 0, b""
    for position, make in enumerate(fields):
        if random.random() < 0.5:
            flags |= 1 << (15 - position)
            parts += make(random)
    return struct.pack(">H", flags) + parts


def _short(random: Random) -> bytes:
    return random.choice(WORDS) if random.random() < 0.8 else random.randbytes(random.randrange(40))


def _short_string(random: Random) -> bytes:
    return _counted(_short(random))


def _counted(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def _headers(random: Random) -> bytes:
    names = {random.choice(HEADERS) if random.random() < 0.9 else _short(random) for _ in range(random.randrange(6))}
    return _table([(name, _value(random)) for name in sorted(names)])


def _value(random: Random, depth: int = 0) -> bytes:
    kind = random.randrange(14 if depth < 3 else 12)
    if kind < 3:
        return b"S" + _long(_short(random))
    if kind < 10:
        return random.choice(_SCALARS)
    if kind == 10:
        return b"x" + _long(_short(random))
    if kind == 11:
        return random.choice(_MONSTERS) if random.random() < 0.1 else b"V"
    inner = [_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 12:
        return b"A" + _long(b"".join(inner))
    return b"F" + _table([(_short(random), value) for value in inner])


def _table(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    return _long(b"".join(_counted(name) + value for name, value in items))


def _long(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def _nested(depth: int) -> bytes:
    value = b"V"
    for _ in range(depth):
        value = b"F" + _table([(b"a", value)])
    return value


_SCALARS: tuple[bytes, ...] = (
    b"t\x01",
    b"t\x00",
    b"b\xff",
    b"B\xff",
    struct.pack(">ch", b"s", -1),
    struct.pack(">cH", b"u", 65_535),
    struct.pack(">ci", b"I", -(2**31)),
    struct.pack(">cI", b"i", 2**32 - 1),
    struct.pack(">cq", b"l", 2**63 - 1),
    struct.pack(">cq", b"l", -(2**63)),
    struct.pack(">cq", b"l", 1_700_000_000_000),
    struct.pack(">cf", b"f", float("nan")),
    struct.pack(">cd", b"d", float("inf")),
    struct.pack(">cd", b"d", 1e300),
    struct.pack(">cBi", b"D", 255, -(2**31)),
    struct.pack(">cQ", b"T", 2**64 - 1),
    struct.pack(">cQ", b"T", 0),
    b"V",
)
_MONSTERS: tuple[bytes, ...] = (
    b"S" + _long(b"x" * LARGE),
    b"S" + _long(b"\xff" * LARGE),
    b"x" + _long(b"\0" * LARGE),
    b"A" + _long(b"t\x01" * (LARGE // 2)),
    _nested(DEEP),
    b"S" + _long(b"[" * LARGE),
)


def _array(items: Iterable[bytes]) -> bytes:
    return b"A" + _long(b"".join(items))


LARGE_TABLES: Mapping[str, bytes] = {
    "voids": _table([(b"h", _array([b"V"] * 129_800))]),
    "fields": _table([(b"", b"V")] * 65_000),
    "headers": _table((b"%d" % number, b"S" + _long(b"x")) for number in range(10_000)),
    "tables": _table((b"%d" % number, b"F" + _table([(b"a", b"V")] * 100)) for number in range(400)),
    "arrays": _table([(b"h", _array([_array([_array([b"V"] * 40)] * 40)] * 40))]),
    "deep": _table([(b"h", b"".join(struct.pack(">cI", b"A", 5 * level) for level in reversed(range(DEEP))))]),
}
"""Headers of up to 130 kB as a single frame may have them: so many small values that each may cost time.

Not deeper: RabbitMQ needs 8 s for an array of 16,000 levels in a quorum queue, and four times that for 32,000."""

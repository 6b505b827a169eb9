"""Whatever RabbitMQ may deliver is read, and what was read can be sent on unchanged: patches of pamqp, and messages."""

import math
import struct
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp import decode, encode

from osrdyne.amqp import Delivery, Message, pamqp_patches
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.hostile import LARGE_TABLES

SHORT = st.binary(max_size=255)


def sized(raw: bytes) -> bytes:
    """A long string, a table or an array: its length, and its content."""
    return struct.pack(">I", len(raw)) + raw


def table(items: list[tuple[bytes, bytes]]) -> bytes:
    return sized(b"".join(bytes([len(name)]) + name + value for name, value in items))


def number(kind: bytes, layout: str, low: int, high: int) -> st.SearchStrategy[bytes]:
    return st.integers(low, high).map(lambda value: kind + struct.pack(layout, value))


SCALARS = st.one_of(
    st.booleans().map(lambda value: b"t" + bytes([value])),
    number(b"b", ">b", -128, 127),
    number(b"B", ">B", 0, 255),
    number(b"s", ">h", -(2**15), 2**15 - 1),
    number(b"u", ">H", 0, 2**16 - 1),
    number(b"I", ">i", -(2**31), 2**31 - 1),
    number(b"i", ">I", 0, 2**32 - 1),
    number(b"l", ">q", -(2**63), 2**63 - 1),
    number(b"T", ">Q", 0, 2**64 - 1),
    st.binary(min_size=5, max_size=5).map(lambda raw: b"D" + raw),
    st.binary(min_size=4, max_size=4).map(lambda raw: b"f" + raw),
    st.binary(min_size=8, max_size=8).map(lambda raw: b"d" + raw),
    st.binary().map(lambda raw: b"S" + sized(raw)),
    st.binary().map(lambda raw: b"x" + sized(raw)),
    st.just(b"V"),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner).map(lambda items: b"A" + sized(b"".join(items)))
        | st.lists(st.tuples(SHORT, inner)).map(lambda items: b"F" + table(items))
    ),
    max_leaves=8,
)
"""Header values of every type that RabbitMQ takes, as bytes on the wire."""


class Counted(bytes):
    """Counts the bytes that are copied out of it."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.copied += len(found) if isinstance(found, bytes) else 0
        return found


@pytest.mark.proves("hostile/hostile-messages-any-queue")
@pytest.mark.parametrize("large", LARGE_TABLES.values(), ids=LARGE_TABLES)
def test_large_table_is_read_without_copies_of_its_rest_and_up_to_a_limit(large):
    """A message with 130 kB of small values took half a second of the leader's event loop."""
    raw = Counted(large)
    Counted.copied = 0
    used, headers = decode.field_table(raw)
    assert used == len(raw)
    assert count(headers) <= pamqp_patches.MAX_FIELDS
    assert Counted.copied <= 300 * pamqp_patches.MAX_FIELDS


def count(value: object) -> int:
    """The fields of a table, those of nested ones included."""
    if isinstance(value, dict):
        return sum(1 + count(item) for item in value.values())
    return sum(1 + count(item) for item in value) if isinstance(value, list) else 0


@given(st.lists(st.tuples(SHORT, VALUES), max_size=5))
def test_table_of_any_types_is_read_and_can_be_sent_on(items):
    raw = table(items)
    used, headers = decode.field_table(raw)
    assert used == len(raw)
    again = encode.field_table(headers)
    assert encode.field_table(decode.field_table(again)[1]) == again


@given(SHORT, SHORT, SHORT)
def test_properties_of_any_bytes_round_trip(correlation_id, reply_to, app_id):
    texts = [raw.decode("utf-8", "surrogateescape") for raw in (correlation_id, reply_to, app_id)]
    sent = spec.Basic.Properties(correlation_id=texts[0], reply_to=texts[1], app_id=texts[2])
    raw = sent.marshal()
    read = spec.Basic.Properties()
    read.unmarshal(struct.unpack(">H", raw[:2])[0], raw[2:])
    assert [value or "" for value in (read.correlation_id, read.reply_to, read.app_id)] == texts


def test_timestamp_is_a_moment_or_none():
    """In seconds or milliseconds; what is beyond all years is none."""
    year = datetime(2026, 1, 1, tzinfo=UTC)
    moments = {0: datetime(1970, 1, 1, tzinfo=UTC), 1_767_225_600: year, 1_767_225_600_000: year}
    for seconds, moment in {**moments, 2**63: None, 2**64 - 1: None}.items():
        raw = struct.pack(">Q", seconds)
        assert decode.timestamp(raw) == (8, moment)
        assert decode.field_table(table([(b"t", b"T" + raw)]))[1] == {"t": moment}


@given(st.floats(), st.integers(-(2**31), 2**31 - 1), st.integers(0, 255))
def test_numbers_keep_their_value_unless_rabbitmq_would_end_the_connection(value, mantissa, scale):
    read = decode.field_table(encode.field_table({"f": value}))[1]["f"]
    assert read == (value if math.isfinite(value) else None)
    raw = table([(b"d", b"D" + struct.pack(">Bi", scale, mantissa))])
    decimal = decode.field_table(raw)[1]["d"]
    assert decimal == Decimal(mantissa).scaleb(-scale)
    assert decode.field_table(encode.field_table({"d": decimal}))[1]["d"] == decimal


@pytest.mark.parametrize("kind", [b"F", b"A"], ids=["tables", "arrays"])
def test_nesting_without_end_is_cut_off_and_what_follows_is_read(kind):
    value = b"V"
    for _ in range(10_000):
        value = b"F" + table([(b"", value)]) if kind == b"F" else b"A" + sized(value)
        if len(value) > 100_000:
            break
    headers = decode.field_table(table([(b"deep", value), (b"after", b"t\x01")]))[1]
    assert headers["after"] is True
    assert encode.field_table(headers)


@pytest.mark.parametrize("raw", [b"\0\0\0\x05\x01a", struct.pack(">I", 2**32 - 1)])
def test_table_longer_than_its_data_and_string_longer_than_the_protocol_allows_are_errors(raw):
    with pytest.raises(ValueError, match="exceeds"):
        decode.field_table(raw)
    with pytest.raises(TypeError, match="255"):
        encode.short_string("é" * 128)


SIMPLE = st.one_of(
    st.text(max_size=50),
    st.binary(max_size=50),
    st.binary(max_size=50).map(bytearray),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.floats(),
    st.booleans(),
    st.none(),
)


@given(st.dictionaries(st.text(max_size=30), SIMPLE, max_size=20))
def test_headers_take_no_more_than_the_bound(headers):
    """Wrong on the low side, it would cost a connection. Nested ones have no quick bound."""
    table_length = 4
    encoded = encode.field_table(headers)  # type: ignore[arg-type]
    assert len(encoded) - table_length <= Message(headers=headers).max_header_bytes() < math.inf
    assert Message(headers={**headers, "x-death": [{"count": 1}]}).max_header_bytes() == math.inf


def test_copy_never_asks_for_answers_to_ourselves():
    """RabbitMQ takes the bare name for the address of the publisher, and closes a channel that has none."""
    bare, channel = "amq.rabbitmq.reply-to", FakeChannel(FakeBroker(VirtualClock()))
    for reply_to, sent_on in ((bare, None), (f"{bare}.g1h2", f"{bare}.g1h2"), ("q", "q")):
        delivery = Delivery(channel, 1, "x", "a", False, b"", Message(reply_to=reply_to).properties())
        assert delivery.to_message(headers={}, expiration=None).reply_to == sent_on

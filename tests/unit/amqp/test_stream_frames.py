"""Messages of streams are the same however the bytes of RabbitMQ are cut, and aiormq gets everything else."""

import struct
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from osrdyne.amqp import Message
from osrdyne.amqp.pamqp_patches import Int64
from osrdyne.amqp.stream_frames import HEARTBEAT, FrameError, StreamFrames, StreamMessage

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
HEADERS = st.dictionaries(
    TEXT, st.one_of(TEXT, st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none(), st.lists(TEXT)), max_size=4
)
MESSAGES = st.builds(
    Message,
    body=st.binary(max_size=300),
    headers=HEADERS,
    content_type=st.none() | TEXT.filter(bool),
    correlation_id=st.none() | TEXT.filter(bool),
    message_id=st.none() | TEXT.filter(bool),
    reply_to=st.none() | TEXT.filter(bool),
    timestamp=st.none() | st.just(datetime(2026, 1, 2, tzinfo=UTC)),
    priority=st.none() | st.integers(0, 9),
)


def delivered(message: Message, *, offset: int, channel: int, routing_key: str = "key", part: int = 100) -> bytes:
    """The frames of one delivery, with its body in parts."""
    properties = message.properties()
    own = {"x-stream-offset": Int64(offset), "x-osrdyne-publish": "1"}
    properties.headers = {**message.headers, **own}  # type: ignore[dict-item]
    parts = [message.body[start : start + part] for start in range(0, len(message.body), part)]
    frames = [
        spec.Basic.Deliver("c0000000001", offset + 1, False, "exchange", routing_key),
        ContentHeader(0, len(message.body), properties),
        *map(ContentBody, parts),
    ]
    return b"".join(frame.marshal(one, channel) for one in frames)


def expected(message: Message, offset: int) -> StreamMessage:
    return StreamMessage(
        offset=offset,
        exchange="exchange",
        routing_key="key",
        body=message.body,
        headers={name: value for name, value in message.headers.items() if name != "x-stream-offset"},
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        message_id=message.message_id,
        timestamp=message.timestamp,
        delivery_tag=offset + 1,
    )


@given(
    messages=st.lists(MESSAGES, max_size=6),
    commands=st.lists(st.sampled_from([Heartbeat(), spec.Basic.ConsumeOk("c"), spec.Channel.CloseOk()]), max_size=3),
    cuts=st.lists(st.integers(0, 5_000), max_size=20),
    offset=st.integers(0, 2**62),
)
def test_messages_do_not_depend_on_where_the_bytes_are_cut(messages, commands, cuts, offset):
    others = [frame.marshal(command, 3) for command in commands]
    pieces = [delivered(one, offset=offset + number, channel=7) for number, one in enumerate(messages)]
    mixed = b"".join(piece for pair in zip(pieces, others, strict=False) for piece in pair)
    longest = min(len(pieces), len(others))
    data = mixed + b"".join(pieces[longest:] + others[longest:])
    frames, passed = StreamFrames(), b""
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for low, high in pairwise(edges):
        passed += frames.feed(data[low:high])
    wanted = [expected(one, offset + number) for number, one in enumerate(messages)]
    assert frames.take(7) == wanted
    assert passed.replace(HEARTBEAT, b"") == b"".join(others).replace(HEARTBEAT, b"")
    assert frames.take(7) == []


def test_messages_of_two_channels_may_alternate():
    def frames_of(number):
        """A method, a header and two bodies."""
        data, parts = delivered(Message(b"x" * 150), offset=number, channel=number), []
        while data:
            size = 8 + struct.unpack_from(">I", data, 3)[0]
            parts.append(data[:size])
            data = data[size:]
        return parts

    frames = StreamFrames()
    frames.feed(b"".join(part for pair in zip(frames_of(1), frames_of(2), strict=True) for part in pair))
    assert [frames.take(number)[0].offset for number in (1, 2)] == [1, 2]


def test_unusual_messages_are_read_and_a_heartbeat_stands_for_them():
    frames = StreamFrames()
    without_offset = delivered(Message(), offset=1, channel=1).replace(b"x-stream-offset", b"x-another-field")
    assert frames.feed(delivered(Message(), offset=1, channel=1, routing_key="k\udcff")) == HEARTBEAT
    frames.feed(without_offset)
    not_utf8, without = frames.take(1)
    assert not_utf8.routing_key.encode("utf-8", "surrogateescape") == b"k\xff"
    assert without.offset == -1


def test_bytes_that_are_no_frames_are_refused_but_the_answer_to_another_version():
    with pytest.raises(FrameError):
        StreamFrames().feed(b"\x01\0\0\0\0\0\0\0\0")
    assert StreamFrames().feed(b"AMQP\x00\x00\x09\x01") == b"AMQP\x00\x00\x09\x01"

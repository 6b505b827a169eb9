"""The writer that sends in one call what is written together, and nothing after the close of a channel."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.heartbeat import Heartbeat

from osrdyne.amqp.transport import CHANNEL_CLOSE, CoalescingWriter, FrameReader


class RecordingTransport(asyncio.WriteTransport):
    """Notes each piece as it would leave."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closing = False

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.sent.append(b"".join(list_of_data))

    def write_eof(self) -> None:
        self.sent.append(b"EOF")

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
async def transport():
    return RecordingTransport()


@pytest.fixture
async def writer(transport):
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    protocol.connection_made(transport)
    return CoalescingWriter(transport, protocol, reader, loop)


async def test_frames_of_one_pass_leave_as_one_piece_in_order_until_the_connection_closes(transport, writer):
    writer.write(b"one ")
    writer.write(b"two")
    assert transport.sent == []
    await asyncio.sleep(0)
    writer.write(b"three")
    await asyncio.sleep(0)
    writer.write(b"too late")
    transport.closing = True
    await asyncio.sleep(0)
    assert transport.sent == [b"one two", b"three"]


@pytest.mark.parametrize("ending", [CoalescingWriter.drain, CoalescingWriter.write_eof, CoalescingWriter.close])
async def test_nothing_stays_behind(transport, writer, ending):
    writer.write(b"last words")
    if (waiting := ending(writer)) is not None:
        await waiting
    assert transport.sent[0] == b"last words"
    writer.close()


FRAMES = b"".join(
    [
        frame.marshal(Heartbeat(), 0),
        frame.marshal(commands.Channel.Close(404, "NOT_FOUND", 50, 10), 7),
        frame.marshal(ContentBody(b"\x01" * 30 + CHANNEL_CLOSE * 5), 8),
        frame.marshal(commands.Channel.CloseOk(), 9),
        frame.marshal(commands.Basic.Ack(1), 0x1234),
        frame.marshal(commands.Channel.Close(406, "", 0, 0), 0x1234),
    ]
)


async def test_closes_are_seen_however_the_frames_arrive_and_the_end_of_the_socket_at_once():
    for size in range(1, len(FRAMES) + 1):
        closed: list[int] = []
        reader = FrameReader(asyncio.get_running_loop())
        reader.on_close = closed.append
        for start in range(0, len(FRAMES), size):
            reader.feed_data(FRAMES[start : start + size])
        assert closed == [7, 0x1234], size
        assert await reader.readexactly(len(FRAMES)) == FRAMES, size
    ended, failed = (FrameReader(asyncio.get_running_loop()) for _ in range(2))
    ended.feed_eof()
    failed.set_exception(ConnectionResetError())
    assert (ended.is_lost, failed.is_lost) == (True, True)


@pytest.mark.parametrize("size", [1, 8, 1000])
async def test_state_of_the_connection_is_seen_in_its_frames(size):
    methods = [
        commands.Connection.Blocked("low on memory"),
        commands.Connection.Unblocked(),
        commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0),
    ]
    reader = FrameReader(asyncio.get_running_loop())
    seen, told = [], list[bool]()
    reader.on_block = told.append
    for method in methods:
        data = frame.marshal(Heartbeat(), 0) + frame.marshal(method, 0)
        for start in range(0, len(data), size):
            reader.feed_data(data[start : start + size])
        seen.append((reader.is_blocked, reader.is_lost))
    assert (seen, told) == ([(True, False), (False, False), (False, True)], [True, False])


async def test_nothing_follows_a_close_before_the_next_open(transport, writer):
    opening, closing, ack = commands.Channel.Open(), commands.Channel.Close(200, "", 0, 0), commands.Basic.Ack(1)
    for number, method in [(1, opening), (2, opening), (1, ack), (1, closing), (1, ack), (1, closing), (2, ack)]:
        writer.write(frame.marshal(method, number))
    writer.answer_close(1)
    writer.write(frame.marshal(commands.Channel.CloseOk(), 1))
    for method in [opening, ack]:
        writer.write(frame.marshal(method, 1))
    await asyncio.sleep(0)
    sent, methods = transport.sent[0], []
    while sent:
        size, number, received = frame.unmarshal(sent)
        methods.append(f"{number} {received.name.partition('.')[2]}")
        sent = sent[size:]
    assert methods == ["1 Open", "2 Open", "1 Ack", "1 Close", "2 Ack", "1 CloseOk", "1 Open", "1 Ack"]
    writer.close()

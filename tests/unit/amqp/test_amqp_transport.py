"""The writer that sends in one call what is written together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from osrdyne.amqp.transport import CoalescingWriter


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
async def transport() -> RecordingTransport:
    return RecordingTransport()


@pytest.fixture
async def writer(transport: RecordingTransport) -> CoalescingWriter:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    protocol.connection_made(transport)
    return CoalescingWriter(transport, protocol, reader, loop)


async def test_frames_of_one_pass_leave_as_one_piece_in_order(
    transport: RecordingTransport, writer: CoalescingWriter
) -> None:
    writer.write(b"one ")
    writer.write(b"two")
    assert transport.sent == []
    await asyncio.sleep(0)
    writer.write(b"three")
    await asyncio.sleep(0)
    assert transport.sent == [b"one two", b"three"]
    writer.close()


@pytest.mark.parametrize("ending", [CoalescingWriter.drain, CoalescingWriter.write_eof, CoalescingWriter.close])
async def test_nothing_stays_behind(transport: RecordingTransport, writer: CoalescingWriter, ending: Any) -> None:
    writer.write(b"last words")
    if (waiting := ending(writer)) is not None:
        await waiting
    assert transport.sent[0] == b"last words"
    writer.close()


async def test_what_is_written_while_the_connection_closes_is_dropped(
    transport: RecordingTransport, writer: CoalescingWriter
) -> None:
    writer.write(b"too late")
    transport.closing = True
    await asyncio.sleep(0)
    assert transport.sent == []

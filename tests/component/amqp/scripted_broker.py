"""RabbitMQ's end of a connection as a script in the same event loop, with its rule (broker: channel-ends).

Any frame but `channel.open` on a channel that is not open closes the connection (504), and so does a second
`channel.open`.
"""

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from pamqp import commands, frame, header
from pamqp.base import Frame
from pamqp.body import ContentBody

PATIENCE = 120.0
CHANNEL_MAX = 50
SERVER_PROPERTIES: dict[str, Any] = {
    "capabilities": {"publisher_confirms": True, "basic.nack": True, "consumer_cancel_notify": True},
    "version": "4.9.0",
}
ANSWERS: dict[type[object], Callable[[Any], Frame]] = {
    commands.Connection.StartOk: lambda _: commands.Connection.Tune(CHANNEL_MAX, 131_072, 60),
    commands.Connection.Open: lambda _: commands.Connection.OpenOk(),
    commands.Connection.Close: lambda _: commands.Connection.CloseOk(),
    commands.Confirm.Select: lambda _: commands.Confirm.SelectOk(),
    commands.Basic.Qos: lambda _: commands.Basic.QosOk(),
    commands.Basic.Consume: lambda request: commands.Basic.ConsumeOk(request.consumer_tag),
    commands.Basic.Cancel: lambda request: commands.Basic.CancelOk(request.consumer_tag),
}


class State(Enum):
    OPEN = "open"
    CLOSING = "closed by the broker, and not yet confirmed by the client"


class ScriptedBroker(asyncio.Transport):
    """Both ends of a connection in one object: what the client writes is answered in the next pass of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.StreamReaderProtocol
        self.channels: dict[int, State] = {}
        self.received: list[tuple[int, Frame]] = []
        self.published: list[header.ContentHeader] = []
        self.violations: list[tuple[int, str]] = []
        self.asked: list[int] = []
        """Channels on which a passive declaration waits for `refuse`."""
        self.silent = False
        """True: no answer to anything."""
        self.reads = True
        """False: what the client writes is on its way."""
        self.holds_close_ok = False
        self.has_alarm = False
        """True: a connection that publishes is blocked, and what it writes is not read any more."""
        self._held: list[int] = []
        self._unread = b""
        self._closing = False

    # --- what the client's side of the socket calls

    def write(self, data: Any) -> None:
        self._unread += bytes(data)
        if self.reads:
            self.read()

    def read(self) -> None:
        self.reads = True
        while self._unread and self.reads:
            size, number, read = frame.unmarshal(self._unread)
            self._unread = self._unread[size:]
            self._receive(number, read)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    # --- the broker

    def send(self, *frames: Any, channel: int = 1) -> None:
        """Send frames so that they arrive together."""
        data = b"".join(frame.marshal(one, channel) for one in frames)
        asyncio.get_running_loop().call_soon(self._deliver, data)

    def deliver(self, tag: str, *bodies: bytes) -> None:
        """Send deliveries to a consumer so that they arrive together."""
        self.send(*deliveries(tag, *bodies))

    def refuse(self, number: int) -> None:
        """Close a channel: the queue that was asked for does not exist."""
        self.asked.remove(number)
        self.close_channel(number, 404, "NOT_FOUND - no queue")

    def close_channel(self, number: int, code: int, text: str) -> None:
        if self.channels.get(number) is State.OPEN:
            self.channels[number] = State.CLOSING
            self.send(commands.Channel.Close(code, text, 50, 10), channel=number)

    def release_close_ok(self) -> None:
        self.holds_close_ok = False
        while self._held:
            self.send(commands.Channel.CloseOk(), channel=self._held.pop(0))

    def _deliver(self, data: bytes) -> None:
        if not self._closing:
            self.protocol.data_received(data)

    def _receive(self, number: int, read: Any) -> None:
        if self.silent and not isinstance(read, commands.Connection.Close):
            return
        if isinstance(read, header.ProtocolHeader):
            self.send(commands.Connection.Start(mechanisms="PLAIN", server_properties=SERVER_PROPERTIES), channel=0)
        elif isinstance(read, header.ContentHeader):
            self.published.append(read)
        elif isinstance(read, Frame):
            self.received.append((number, read))
            if number == 0 or not self._receive_of_channel(number, read):
                self._answer(number, read)

    def _answer(self, number: int, read: Frame) -> None:
        if self.has_alarm and isinstance(read, commands.Basic.Publish):
            self.reads = False
            self.send(commands.Connection.Blocked("low on memory"), channel=0)
        if type(read) in ANSWERS and not self.silent:
            self.send(ANSWERS[type(read)](read), channel=number)

    def _receive_of_channel(self, number: int, read: Frame) -> bool:
        """Follow the state of a channel; whether that was all."""
        match self.channels.get(number), read:
            case None, commands.Channel.Open():
                self.channels[number] = State.OPEN
                self.send(commands.Channel.OpenOk(), channel=number)
            case (None, _) | (_, commands.Channel.Open()):
                self.violations.append((number, read.name))
                self.send(commands.Connection.Close(504, "CHANNEL_ERROR", 0, 0), channel=0)
            case State.OPEN, commands.Channel.Close():
                del self.channels[number]
                self._held.append(number)
                if not self.holds_close_ok:
                    self.release_close_ok()
            case State.OPEN, commands.Queue.Declare(passive=True):
                self.asked.append(number)
            case State.CLOSING, commands.Channel.CloseOk():
                del self.channels[number]
            case State.CLOSING, commands.Channel.Close():
                self._held.append(number)
                if not self.holds_close_ok:
                    self.release_close_ok()
            case State.OPEN, _:
                return False
        return True


def deliveries(tag: str, *bodies: bytes) -> list[Any]:
    frames: list[Any] = []
    for number, body in enumerate(bodies, start=1):
        frames += [
            commands.Basic.Deliver(tag, number, False, "", "q"),
            header.ContentHeader(body_size=len(body), properties=commands.Basic.Properties()),
            ContentBody(body),
        ]
    return frames


async def passes(count: int) -> None:
    """Let the event loop pass `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)

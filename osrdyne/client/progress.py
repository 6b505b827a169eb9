"""Inquiries about keys that are starting, for the calls of one session that have `on_starting`.

One inquiry per key and interval, however many calls wait for the key, and none for a call that is answered within
`FIRST_INQUIRY`. The inquiries have their own channel. If the pool is older, or the user may not write to the exchange,
RabbitMQ closes only that channel, and calls are not affected. Source: docs/reference/protocol/progress.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from osrdyne.amqp import Channel, Connection, Consumer, Message
from osrdyne.errors import OsrdyneError
from osrdyne.logs import get_logger
from osrdyne.protocol.names import DIRECT_REPLY_TO, Key, PoolNames
from osrdyne.protocol.progress import FIRST_INQUIRY, RUNNING_INTERVAL, STARTING_INTERVAL, StartProgress

log = get_logger("client")

StartCallback = Callable[[StartProgress], None]

_TICK = 0.25  # Seconds between two checks of the waiting calls, and so the precision of an interval.
_PAUSE = 60.0  # Seconds without inquiries after RabbitMQ refused the channel or the exchange.
_MAX_ASKED = 10_000  # Inquiries without an answer; without a leader, none of them is answered.


class WaitingCall(Protocol):
    """A call that receives the progress of the start of its key."""

    def starting(self, progress: StartProgress) -> None: ...


@dataclass(slots=True)
class _Watch:
    """The calls that wait for one key, the earliest first, each with the time at which it began to wait."""

    calls: dict[WaitingCall, float] = field(default_factory=dict)
    ask_at: float = 0.0


class StartInquiries:
    """The inquiries of one session. `watch` begins them; `close` must run before the connection is closed."""

    def __init__(self, names: PoolNames, connection: Connection) -> None:
        self._exchange = names.progress_exchange
        self._connection = connection
        self._watches: dict[Key, _Watch] = {}
        self._asked: dict[str, Key] = {}
        self._numbers = itertools.count(1)
        self._asking: asyncio.Task[None] | None = None

    def watch(self, key: Key, call: WaitingCall) -> None:
        """Report the start of its key to the call until `forget`."""
        self._watches.setdefault(key, _Watch()).calls[call] = asyncio.get_running_loop().time()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._run(), name="osrdyne client progress")

    def forget(self, key: Key, call: WaitingCall) -> None:
        """Stop the reports to a call: it has a reply, or has ended."""
        watch = self._watches.get(key)
        if watch is not None and watch.calls.pop(call, None) is not None and not watch.calls:
            del self._watches[key]

    async def close(self) -> None:
        """End the inquiries; the connection closes their channel."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    async def _run(self) -> None:
        """Send inquiries until no call waits. A refusal pauses the inquiries and does not affect the calls."""
        while self._watches:
            if self._next_to_ask() is None or self._connection.is_blocked:
                await asyncio.sleep(_TICK)
                continue
            try:
                await self._ask_over_a_channel()
            except OsrdyneError as error:
                log.info("progress of starts not available", error=str(error))
                await asyncio.sleep(_PAUSE)

    async def _ask_over_a_channel(self) -> None:
        """Send inquiries for the keys that are due, until no call waits or the channel is lost."""
        probe = await self._connection.channel()
        # On a channel that nothing else uses: RabbitMQ closes it if the pool has no such exchange.
        await probe.declare_exchange(self._exchange, "fanout", passive=True)
        await probe.close()
        channel = await self._connection.channel()
        try:
            answers = await channel.consume(DIRECT_REPLY_TO, no_ack=True)
            reading = asyncio.create_task(self._read(answers), name="osrdyne client progress answers")
            try:
                while self._watches:
                    await self._ask_all(channel)
                    if reading.done():
                        reading.result()  # raises why the channel was lost
                    await asyncio.wait({reading}, timeout=_TICK)
            finally:
                reading.cancel()
                await asyncio.wait({reading})
        finally:
            self._asked.clear()
            await channel.close()

    def _next_to_ask(self) -> Key | None:
        """A key whose next inquiry is due, and for which a call has waited for `FIRST_INQUIRY`."""
        now = asyncio.get_running_loop().time()
        for key, watch in self._watches.items():
            if watch.ask_at <= now and now - next(iter(watch.calls.values())) >= FIRST_INQUIRY:
                return key
        return None

    async def _ask_all(self, channel: Channel) -> None:
        while not self._connection.is_blocked and (key := self._next_to_ask()) is not None:
            # The interval of a starting key until an answer comes: without a leader at present, none does.
            self._watches[key].ask_at = asyncio.get_running_loop().time() + STARTING_INTERVAL
            number = str(next(self._numbers))
            self._asked[number] = key
            if len(self._asked) > _MAX_ASKED:
                del self._asked[next(iter(self._asked))]  # the oldest, which has expired
            message = Message(reply_to=DIRECT_REPLY_TO, correlation_id=number, persistent=False)
            await channel.publish(message, exchange=self._exchange, routing_key=key)

    async def _read(self, answers: Consumer) -> None:
        while True:
            answer = await answers.get()
            key = self._asked.pop(answer.properties.correlation_id or "", None)
            watch = None if key is None else self._watches.get(key)
            if watch is None:
                continue
            progress = StartProgress.from_json(answer.body)
            if progress is None:
                watch.ask_at = asyncio.get_running_loop().time() + RUNNING_INTERVAL
                continue
            for call in list(watch.calls):
                call.starting(progress)

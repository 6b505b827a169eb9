"""A worker as the leader and the broker see it: it loads, reports, consumes, answers, and has its faults.

Made by `history_world` for each worker that the driver starts. The real worker's own code is tested elsewhere.
"""

import asyncio
import itertools
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Delivery, Message
from osrdyne.drivers.base import InstanceId
from osrdyne.errors import BrokerError, BrokerUnavailableError
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.control import Command, control_from_wire
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.statuses import Status
from osrdyne.testing.drivers import FakeWorker
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker, Holder, Stored

LOAD_TIME = 1.0
SLOW_LOAD_TIME = 20.0
LONG_WORK = 70.0
"""Longer than it takes an idle group to end."""
BUSY_INTERVAL = 5.0
HEARTBEAT_TIMEOUT = 15.0
"""Shorter than `start_timeout`, as in the defaults."""


class Ends(Protocol):
    """What a worker that ends by itself is taken out of: the driver, or its process."""

    def exit_instance(self, instance_id: InstanceId, code: int) -> None: ...


class Manner(StrEnum):
    """What a worker is like."""

    ORDINARY = "ordinary"
    SLOW = "slow"
    DEAF = "deaf"
    """Runs, and neither consumes nor reports."""
    SILENT = "silent"
    """Consumes, and reports nothing: it knows part of the protocol only."""
    FROZEN = "frozen"
    """Stands still with its first request: it neither reports nor receives anything."""
    IDLE = "idle"
    """Says that it is ready, and takes nothing."""
    STUBBORN = "stubborn"
    """Ends only when it is killed."""


class Kind(StrEnum):
    """What a request is like."""

    PLAIN = "plain"
    LONG = "long"
    DEADLY = "deadly"
    """Ends every worker that takes it."""
    BRIEF = "brief"
    """With five seconds to live."""
    MODEST = "modest"
    """With `x-no-activate`."""


class SimulatedWorker:
    """One worker, from its start to its end."""

    def __init__(
        self, fake: FakeWorker, manner: Manner, *, names: PoolNames, broker: FakeBroker, home: Ends, clock: Clock
    ) -> None:
        self.fake = fake
        self.key = fake.spec.key
        self.manner = manner
        self.reports_arrive: Callable[[], bool] = lambda: True
        self.interrupted: bytes | None = None
        """The request that it was working on when it was ended."""
        self.channel = FakeChannel(broker)
        fake.stubborn = manner is Manner.STUBBORN
        self._names = names
        self._broker = broker
        self._home = home
        self._clock = clock
        self._state = Event.STARTED
        self._working_on: Delivery | None = None
        self._cancelled = asyncio.Event()
        self._control_queue = names.control_queue(fake.spec.worker_id)
        self._draining = False
        self._stands_still = False

    async def live(self) -> None:
        """Until it ends; its last channel stays open then."""
        self._listen()
        serving = asyncio.ensure_future(self._serve())
        try:
            await self.fake.gone.wait()
        finally:
            serving.cancel()
            self._broker.delete_queue(self._control_queue)
        end = self.fake.instance.exit
        ended_itself = end is not None and end.code == 1
        if self._working_on is not None and not ended_itself and not self._stands_still:
            self.interrupted = self._working_on.body

    def _go(self) -> None:
        """It has finished, and ends by itself."""
        self._home.exit_instance(self.fake.instance.instance_id, code=0)

    def crash(self) -> None:
        self._home.exit_instance(self.fake.instance.instance_id, code=1)

    async def _serve(self) -> None:
        self._report(Event.STARTED)
        await self._clock.sleep(SLOW_LOAD_TIME if self.manner is Manner.SLOW else LOAD_TIME)
        if self.manner is Manner.IDLE:
            self._report(Event.READY)
        if self.manner in {Manner.DEAF, Manner.IDLE}:
            return
        for attempt in itertools.count():
            if attempt:
                await self._clock.sleep(1.0)
                self.channel = FakeChannel(self._broker)
            try:
                consumer = await self.channel.consume(self._names.request_queue(self.key), prefetch=1)
                self._report(Event.READY)
                async for delivery in consumer:
                    await self._work(delivery)
                    if self.fake.gone.is_set():
                        return
            except BrokerError:
                self._working_on = None  # the channel is gone, or the queue: what it held is the broker's again

    async def _work(self, delivery: Delivery) -> None:
        self._working_on = delivery
        self._cancelled.clear()
        self._report(Event.REQUEST_RECEIVED)
        kind = kind_of(delivery.body)
        if kind is Kind.DEADLY:
            return self.crash()
        if self.manner is Manner.FROZEN:
            return await self._stand_still()
        if kind is Kind.LONG:
            await self._work_long()
        answer = Response(Status.CANCELLED if self._cancelled.is_set() else Status.OK)
        message = Message(headers=answer.wire_headers(), correlation_id=delivery.properties.correlation_id)
        await self._broker.publish(message, exchange="", routing_key=delivery.properties.reply_to or "")
        await delivery.ack()
        self._working_on = None
        self._report(Event.REQUEST_COMPLETED)
        if self._draining:
            self._go()

    async def _stand_still(self) -> None:
        """Until it is ended; the broker gives its connection up before, because there are no heartbeats."""
        self._stands_still = True
        await self._clock.sleep(HEARTBEAT_TIMEOUT)
        self.channel.end(None)
        await self.fake.gone.wait()

    async def _work_long(self) -> None:
        until = self._clock.monotonic() + LONG_WORK
        while self._clock.monotonic() < until and not self._cancelled.is_set():
            self._report(Event.BUSY)
            await self._clock.sleep(BUSY_INTERVAL)
            if self.channel.is_closed:
                raise BrokerUnavailableError("The broker has taken the request back.")

    # --- reports and control messages

    def _report(self, event: Event) -> None:
        """Reports may be lost, and requests may not: they take no part in the order of commands."""
        self._state = event
        queue = self._broker.queues.get(self._names.activity_queue)
        if queue is None or self.manner is Manner.SILENT or not self.reports_arrive():
            return
        details = {"in_flight": int(self._working_on is not None)}
        report = ActivityReport(self.key, event, self.fake.spec.worker_id, details)
        message = Message(body=report.wire_body(), headers=report.wire_headers())
        queue.put(message, exchange=self._names.activity_exchange, routing_key=self.key)

    def _listen(self) -> None:
        queue = self._broker.declare_queue(self._control_queue, {})
        worker_id = self.fake.spec.worker_id
        for routing_key in (
            self._names.control_group_routing_key(self.key),
            self._names.control_worker_routing_key(worker_id),
        ):
            self._broker.bind(queue.name, self._names.control_exchange, routing_key)
        queue.holders.append(Holder(deliver=self._obey, on_delete=lambda: None))

    def _obey(self, stored: Stored) -> None:
        message = control_from_wire(stored.message.body)
        if message is None or self._stands_still:
            return
        if message.command is Command.RESUME:
            self._report(self._state)
        elif message.command is Command.CANCEL and self._working_on is not None:
            properties = self._working_on.properties
            if message.details.get("correlation_id") == properties.correlation_id:
                self._cancelled.set()
        elif message.command is Command.DRAIN and self.manner is not Manner.STUBBORN:
            self._draining = True
            if self._working_on is None:
                self._go()


def kind_of(body: bytes) -> Kind:
    return Kind(body.decode().rpartition(" ")[2])

"""The records of changes: written to the queue `P-audit`, and read from it without removing them.

A reading takes every message and closes its channel, so that RabbitMQ requeues them in their order (broker:
returns-by-tag). The queue is read once in a term; then all records are in memory, with those that this leader writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

from osrdyne.amqp import Channel, Message
from osrdyne.auth.audit import AuditPage, AuditQuery, AuditRecord, page_of, parse_record
from osrdyne.errors import BrokerError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.processors.forgeries import Forgeries

CONFIRM_TIMEOUT = 5.0  # Seconds that a change waits for the confirm of a record.
MAX_PENDING = 1_000  # Records that wait for RabbitMQ, which may block publishers for long.
ARRIVAL_TIMEOUT = 5.0  # Seconds to wait for a counted message; if it does not arrive, another consumer has taken it.


class AuditTrail:
    """The records of one leader's term."""

    def __init__(
        self,
        context: TermContext,
        *,
        publisher: Publisher,
        open_channel: Callable[[], Awaitable[Channel]],
        forgeries: Forgeries,
    ) -> None:
        settings = context.settings.audit
        self._names, self._clock, self._metrics = context.names, context.clock, context.metrics
        self._max_age = settings.max_age
        self._max_records = 2 * settings.max_changes
        self._publisher = publisher
        self._open_channel = open_channel
        self._forgeries = forgeries
        self._pending: asyncio.Queue[tuple[AuditRecord, asyncio.Future[bool]]] = asyncio.Queue(MAX_PENDING)
        self._has_ended = False
        self._reading = asyncio.Lock()
        self._has_read = False
        self._copies = 0  # Messages beyond one for each record, such as a record that was published again.
        self._records: dict[tuple[str, bool], AuditRecord] = {}
        self._log: Logger = get_logger("audit", pool=context.names.pool)

    async def run(self) -> None:
        """Publish records in their order. Runs until cancelled."""
        try:
            while True:
                record, stored = await self._pending.get()
                try:
                    await self._publish(record)
                except BrokerError as error:
                    self._lose(record, stored, str(error))
                except BaseException:
                    self._lose(record, stored, "the leader's term has ended")
                    raise
                else:
                    self._metrics.audit_records.labels(result="stored").inc()
                    self._keep(record)
                    _answer(stored, True)
        finally:
            self._has_ended = True
            while not self._pending.empty():
                self._lose(*self._pending.get_nowait(), "the leader's term has ended")

    async def write(self, record: AuditRecord) -> bool:
        """Store a record. False if RabbitMQ has not confirmed it within a few seconds; it may do so later."""
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._has_ended or self._pending.full():
            self._lose(record, stored, "the term has ended" if self._has_ended else "too many records wait")
            return False
        self._pending.put_nowait((record, stored))
        # The publish goes on after the time-out, so that the records stay in order: RabbitMQ may confirm it later.
        await asyncio.wait({stored}, timeout=CONFIRM_TIMEOUT)
        return stored.done() and stored.result()

    async def _publish(self, record: AuditRecord) -> None:
        message = Message(body=record.to_text().encode(), content_type="application/json")
        await self._publisher.publish(message, exchange=self._names.audit_exchange, routing_key="", mandatory=True)

    def _lose(self, record: AuditRecord, stored: asyncio.Future[bool], reason: str) -> None:
        self._metrics.audit_records.labels(result="lost").inc()
        # With all fields: the log is the only place that has them.
        self._log.error("audit record not stored", reason=reason, **asdict(record))
        _answer(stored, False)

    def _keep(self, record: AuditRecord) -> None:
        self._records[record.request_id, record.is_final] = record
        while len(self._records) > self._max_records:
            del self._records[next(iter(self._records))]

    async def page(self, query: AuditQuery) -> AuditPage:
        """Records that match, the newest first. Raises `BrokerError`."""
        async with self._reading:
            channel = await self._open_channel()
            try:
                ready = (await channel.declare_queue(self._names.audit_queue, passive=True)).ready
            finally:
                await channel.close()
            # More messages than known ones: those that the reader of an earlier leader held have returned.
            if not self._has_read or ready > len(self._records) + self._copies:
                await self._read(ready)
        # RabbitMQ removes a message that is too old only at the head of the queue.
        oldest = self._clock.time() - self._max_age
        query = replace(query, since=oldest if query.since is None else max(query.since, oldest))
        return await asyncio.to_thread(page_of, list(self._records.values()), query)

    async def _read(self, count: int) -> None:
        """Read `count` messages; later ones are those that this leader writes meanwhile."""
        found: dict[tuple[str, bool], AuditRecord] = {}
        valid = 0
        channel = await self._open_channel()
        try:
            consumer = await channel.consume(self._names.audit_queue, prefetch=max(1, min(count, self._max_records)))
            for _ in range(count):
                try:
                    async with asyncio.timeout(ARRIVAL_TIMEOUT):
                        delivery = await consumer.get()
                except TimeoutError:
                    self._log.warning("audit records not all readable", expected=count, read=len(found))
                    break
                if self._forgeries.is_forged(delivery, self._names.audit_exchange, queue="audit"):
                    await delivery.ack()
                    continue
                record = parse_record(delivery.body)
                if record is None:
                    self._metrics.invalid_messages.labels(queue="audit").inc()
                    await delivery.ack()
                    continue
                valid += 1
                found[record.request_id, record.is_final] = record
        finally:
            # Closing it returns everything. Crash before: RabbitMQ does the same.
            await channel.close()
        written, self._records = self._records, {}
        for record in (*found.values(), *written.values()):
            self._keep(record)
        self._has_read, self._copies = True, max(0, valid - len(self._records))


def _answer(stored: asyncio.Future[bool], value: bool) -> None:
    if not stored.done():
        stored.set_result(value)

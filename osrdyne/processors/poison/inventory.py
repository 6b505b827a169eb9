"""The poison inventory: reads and changes the queue `P-poison`. One per leader's term, its only consumer.

A reading takes every message and requeues it. That adds to RabbitMQ's count of deliveries (on 3.10, where requeueing
counts) and changes the order of the queue, on every version. So entries are ordered by their time and id, lists are
answered from an index while the queue is unchanged, and an entry that was read very often is replaced by a copy long
before the delivery limit of the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from osrdyne.amqp import Channel, Delivery
from osrdyne.errors import InvalidKeyError, PoisonNotFoundError, PublishRefusedError
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import Publisher
from osrdyne.pool.views import PoisonPage, PoisonQuery
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.poison.entries import Cursor, cursor_of, matches, page_of, replayed, resolve
from osrdyne.processors.poison.reader import Reading
from osrdyne.protocol.messages import DELIVERY_COUNT_HEADER, SPLIT_HEADER
from osrdyne.protocol.names import parse_key
from osrdyne.protocol.poison import PoisonOutcome, PoisonRecord
from osrdyne.protocol.statuses import decode_text

MAX_ENTRIES = 10_000  # Entries that a reading takes; further ones are listed when some of these are removed.
MAX_INDEX_AGE = 60.0  # Seconds for which an index is used while the queue has the same length.
RENEW_AT = 500_000  # Deliveries after which an entry is replaced by a copy; the queue's own limit is twice that.
RETURN_TIMEOUT = 2.0

# Acts on an entry before it is removed; returns a reason not to remove it, or None.
Act = Callable[[PoisonRecord, Delivery], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class _Index:
    """All entries in order, without bodies; how many were ready at `read_at` (monotonic)."""

    views: tuple[PoisonRecord, ...]
    ready: int
    read_at: float


class PoisonInventory:
    """Every method raises `BrokerError` when the leader's term ends meanwhile; then all entries are still there."""

    def __init__(
        self,
        context: TermContext,
        *,
        publisher: Publisher,
        open_channel: Callable[[], Awaitable[Channel]],
        forgeries: Forgeries,
        user: str | None = None,
        renew_at: int = RENEW_AT,
    ) -> None:
        self._names, self._clock = context.names, context.clock
        self._publisher = publisher
        self._open_channel = open_channel
        self._forgeries = forgeries
        self._user = user
        self._renew_at = renew_at
        self._lock = asyncio.Lock()
        self._index: _Index | None = None
        self._requeued = 0
        self._log: Logger = get_logger("poison", pool=self._names.pool)

    async def page(self, query: PoisonQuery) -> PoisonPage:
        """Entries that match, oldest first. Raises `PoisonNotFoundError` for an invalid cursor."""
        after = None if query.after is None else Cursor.parse(query.after)
        async with self._lock:
            # One reading at a time: two of them would take each other's entries and each see a part of the queue.
            index = await self._fresh_index()
            found = [view for view in index.views if matches(view, query, now=self._clock.time())]
            chosen = page_of(found, after=after, limit=query.limit, with_bodies=query.bodies)
            rest = chosen and cursor_of(chosen[-1]) < cursor_of(found[-1])
            following = str(cursor_of(chosen[-1])) if rest else None
            if query.bodies and chosen:
                bodies = await self._bodies({view.id for view in chosen})
                chosen = [replace(view, body=bodies.get(view.id)) for view in chosen]
        return PoisonPage(tuple(chosen), len(found), following, complete=index.ready <= MAX_ENTRIES)

    async def entry(self, name: str) -> PoisonRecord:
        """One entry with its body. Raises `PoisonNotFoundError`."""
        async with self._lock:
            view = resolve(name, (await self._fresh_index()).views)
            bodies = await self._bodies({view.id})
        if view.id not in bodies:
            raise PoisonNotFoundError(f"The entry {name} is not in the poison inventory any more.")
        return replace(view, body=bodies[view.id])

    async def replay(self, names: Sequence[str]) -> PoisonOutcome:
        """Publish requests again, each with a confirm, then remove its entry; a crash in between leaves both."""
        return await self._remove(names, self._publish_again)

    async def drop(self, names: Sequence[str]) -> PoisonOutcome:
        """Remove entries permanently."""

        async def log_entry(view: PoisonRecord, _: Delivery) -> None:
            self._log.info("poison entry dropped", key=view.key, entry=view.id, correlation_id=view.correlation_id)

        return await self._remove(names, log_entry)

    async def _publish_again(self, view: PoisonRecord, delivery: Delivery) -> str | None:
        if view.key is None:
            return "The entry has no key: osrdyne did not store it. Publish it yourself, or drop it."
        try:
            key = parse_key(decode_text(delivery.headers.get(SPLIT_HEADER)) or view.key)
            # The user proves to the ingress that an operator sends the request, which then needs no token.
            message = replace(replayed(delivery), user_id=self._user)
            # To the exchange, as any request: the group may be gone by now (lifecycle: forward-to-exchange).
            await self._publisher.publish(
                message, exchange=self._names.requests_exchange, routing_key=key, mandatory=True
            )
        except (InvalidKeyError, PublishRefusedError) as error:
            return str(error)
        self._log.info("poison entry replayed", key=key, entry=view.id, correlation_id=view.correlation_id)
        return None

    async def _remove(self, names: Iterable[str], act: Act) -> PoisonOutcome:
        done: list[str] = []
        refused: dict[str, str] = {}
        async with self._lock:
            views = (await self._fresh_index()).views
            asked: dict[str, str] = {}
            for name in names:
                with suppress(PoisonNotFoundError):
                    # Resolved against one index: a prefix that is unique now must not become ambiguous halfway.
                    asked.setdefault(resolve(name, views).id, name)
            if asked:
                # The removals below change the queue, also if one of them fails: the next reading lists it anew.
                self._index = None
                async with self._reading() as reading:
                    async for view, delivery in reading:
                        if view.id in asked:
                            refusal = await act(view, delivery)
                            if refusal is None:
                                # Crash before it: the request was published and its entry stays, so that an operator
                                # may replay it twice. The other order would lose the request.
                                await reading.remove(delivery)
                                done.append(asked[view.id])
                            else:
                                refused[asked[view.id]] = refusal
                            if len(done) + len(refused) == len(asked):
                                break
        missing = [name for name in dict.fromkeys(names) if name not in done and name not in refused]
        return PoisonOutcome(tuple(done), tuple(missing), refused)

    # --- reading

    async def _fresh_index(self) -> _Index:
        channel = await self._open_channel()
        try:
            ready = await self._count(channel)
        finally:
            await channel.close()
        now = self._clock.monotonic()
        index = self._index
        # The length alone misses a removal and an addition in between; therefore an index is never used for long.
        if index is None or index.ready != ready or now - index.read_at > MAX_INDEX_AGE:
            async with self._reading() as reading:
                # Without bodies: the index stays in memory, and ten thousand bodies would not fit.
                views = [replace(view, body=None) async for view, _ in reading]
            index = self._index = _Index(tuple(sorted(views, key=cursor_of)), ready, now)
        return index

    async def _count(self, channel: Channel) -> int:
        """How many messages are ready; those requeued a moment ago may not be ready yet."""
        patience = RETURN_TIMEOUT
        while True:
            ready = (await channel.declare_queue(self._names.poison_queue, passive=True)).ready
            # The last reading requeued this many: fewer means that RabbitMQ has not processed all of them yet.
            if ready >= self._requeued or patience <= 0:
                return ready
            await self._clock.sleep(0.05)
            patience -= 0.05

    async def _bodies(self, wanted: set[str]) -> dict[str, bytes]:
        bodies: dict[str, bytes] = {}
        async with self._reading() as reading:
            async for view, delivery in reading:
                if view.id in wanted:
                    bodies[view.id] = delivery.body
                    if len(bodies) == len(wanted):
                        break
        return bodies

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[Reading]:
        """A reading of the whole queue; at its end everything that was not removed is requeued."""
        channel = await self._open_channel()
        reading = Reading(channel, self._names.poison_queue, self._renew, is_forged=self._is_forged)
        try:
            # The count of now bounds the reading: entries that are requeued meanwhile would otherwise be read again and
            # again.
            reading.expect(min(await self._count(channel), MAX_ENTRIES))
            yield reading
        finally:
            # Some versions count each requeue as a delivery; `_renew` replaces entries that were read often.
            self._requeued = await reading.requeue()

    def _is_forged(self, delivery: Delivery) -> bool:
        return self._forgeries.is_forged(delivery, self._names.poison_exchange, queue="poison")

    async def _renew(self, delivery: Delivery) -> bool:
        """Replace an entry that was read very often: the copy first, so that a crash leaves both."""
        count = delivery.headers.get(DELIVERY_COUNT_HEADER)
        if not isinstance(count, int) or count < self._renew_at:
            return False
        copy = delivery.to_message(headers=delivery.headers, expiration=None)
        await self._publisher.publish(
            copy, exchange=self._names.poison_exchange, routing_key=self._names.poison_queue, mandatory=True
        )
        self._log.info("poison entry renewed", deliveries=count)
        return True

"""The poison inventory on a real broker: looking changes nothing, acting loses nothing, and nothing surprises it."""

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from broker_api import ready_in, until

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import Channel, Delivery, Message
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.publishing.publisher import LeaderPublisher
from osrdyne.broker.topology.declarations import pool_topology
from osrdyne.errors import BrokerUnavailableError, PoisonNotFoundError
from osrdyne.pool.views import PoisonQuery
from osrdyne.processors.forgeries import Forgeries
from osrdyne.processors.poison.entries import DEATHS_HEADER, KEY_HEADER, LAST_AT_HEADER, UNIQUE_HEADER, poison_entry
from osrdyne.processors.poison.inventory import PoisonInventory
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import PoisonRecord, WorkerDeath
from osrdyne.testing.fakes.context import make_context

NOW_MS = 1_700_000_000_000
DEATH = WorkerDeath("w1", "exit code 9", None, 1_699_999_999.0, ("out of memory",), 0)


class Pool:
    """A pool's queues, an inventory over them, and one caught request to make entries of."""

    def __init__(self, connection: amqp.Connection, channel: Channel, pool: str) -> None:
        self.context = make_context(pool=pool, clock=SystemClock())
        self.names = self.context.names
        self.channel = channel
        self.connection = connection
        self.publisher = LeaderPublisher(channel, connection, clock=SystemClock())
        self.inventory = self.make_inventory(self.publisher)

    def make_inventory(self, publisher: LeaderPublisher, renew_at: int = 500_000) -> PoisonInventory:
        return PoisonInventory(
            self.context,
            publisher=publisher,
            open_channel=self.connection.channel,
            forgeries=Forgeries(self.context),
            renew_at=renew_at,
        )

    async def caught(self, message: Message, key: str) -> Delivery:
        """The message as a consumer gets it."""
        queue = f"{self.names.pool}-caught"
        await self.channel.declare_queue(queue, exclusive=True, durable=False)
        await self.channel.bind_queue(queue, self.names.dead_letter_exchange)
        await self.channel.publish(message, exchange=self.names.dead_letter_exchange, routing_key=key)
        delivery = await self.channel.get(queue)
        assert delivery is not None
        await delivery.ack()
        return delivery

    async def put(self, message: Message) -> None:
        """Into the inventory's queue, as it is."""
        await self.channel.publish(message, exchange=self.names.poison_exchange, routing_key="")

    async def poison(self, message: Message, key: str = "k", at_ms: int = NOW_MS) -> None:
        """What the dead letter responder does."""
        await self.put(poison_entry(await self.caught(message, key), deliveries=6, now_ms=at_ms, deaths=[DEATH]))

    async def many(self, count: int) -> None:
        """Entries in an order of their own, their number as the body."""
        delivery = await self.caught(Message(), "k")
        entries = [poison_entry(delivery, deliveries=6, now_ms=NOW_MS + number) for number in range(count)]
        numbered = [replace(entry, body=b"%d" % number) for number, entry in enumerate(entries)]
        random.Random(1).shuffle(numbered)
        await asyncio.gather(*(self.put(entry) for entry in numbered))

    async def views(self, **query: object) -> list[PoisonRecord]:
        return list((await self.inventory.page(PoisonQuery(**query))).entries)

    async def serve(self, key: str) -> None:
        """There is a queue for requests of this key."""
        await self.channel.declare_queue(f"{self.names.pool}-served", exclusive=True, durable=False)
        await self.channel.bind_queue(f"{self.names.pool}-served", self.names.requests_exchange, key)

    async def served(self) -> Delivery | None:
        """What came out of the request exchange."""
        return await self.channel.get(f"{self.names.pool}-served")


@pytest.fixture
async def pool(connection, channel, pool_id):
    await declare_topology(channel, pool_topology(pool_id))
    yield Pool(connection, channel, pool_id)


async def test_fifty_listings_in_pages_disturb_nothing(pool):
    await pool.many(100)
    first = await pool.views(bodies=True)
    assert [view.body for view in first] == [b"%d" % number for number in range(100)]
    for number in range(50):
        bodies = number % 10 == 0
        assert await pool.views(bodies=bodies) == [view if bodies else replace(view, body=None) for view in first]
    seen, after = [], None
    for _ in range(3):
        page = await pool.inventory.page(PoisonQuery(after=after, limit=35, bodies=True))
        assert page.total == 100
        seen, after = [*seen, *page.entries], page.next
    assert (after, seen) == (None, first)
    channel = await pool.connection.channel()
    # What the last listing had is given back a little later.
    await until(lambda: ready_in(channel, pool.names.poison_queue), equals=100)
    delivery = await channel.get(pool.names.poison_queue)
    assert delivery.headers["x-delivery-count" if "x-delivery-count" in delivery.headers else "x-acquired-count"] < 20
    await channel.close()


async def test_entry_tells_everything_about_the_request(pool):
    timestamp = datetime(2023, 11, 14, tzinfo=UTC)
    message = Message(
        b"\xff", {"x-rpc-path": "/sql", "x": 1}, correlation_id="c", reply_to="r", message_id="m", app_id="a",
        content_type="text/plain", timestamp=timestamp,
    )  # fmt: skip
    await pool.poison(message, "infra=42,é漢🚄")
    [view] = await pool.views()
    shown = await pool.inventory.entry(view.id[:6])
    assert (shown.key, shown.path, shown.correlation_id, shown.reply_to) == ("infra=42,é漢🚄", "/sql", "c", "r")
    assert (shown.message_id, shown.app_id, shown.content_type, shown.body) == ("m", "a", "text/plain", b"\xff")
    assert (shown.first_at, shown.last_at) == (timestamp.timestamp(), NOW_MS / 1000)
    assert shown.headers == {"x-rpc-path": "/sql", "x": 1}
    assert (shown.deliveries, shown.unexplained, shown.deaths) == (6, 5, (DEATH,))


@pytest.mark.proves("workers/innocent-request-reaches-delivery")
async def test_replay_sends_the_request_as_it_was(pool):
    headers: dict[str, object] = {"x-rpc-path": b"/sql", "x-deadline": 1, "x-osrdyne-hops": 31, "odd": [{"a": 1.5}]}
    await pool.poison(Message(b"body", headers, correlation_id="c", reply_to="r", priority=3, app_id="a"), "a b")
    [view] = await pool.views()
    await pool.serve("a b")
    outcome = await pool.inventory.replay([view.id])
    assert outcome.done == (view.id,)
    request = await pool.served()
    assert (request.routing_key, request.body, request.properties.correlation_id) == ("a b", b"body", "c")
    assert (request.properties.reply_to, request.properties.priority, request.properties.app_id) == ("r", 3, "a")
    assert request.headers == {"x-rpc-path": "/sql", "odd": [{"a": 1.5}], "x-osrdyne-replay": 1}
    assert await pool.views() == []
    await pool.poison(Message(headers=request.headers), "a b")
    [view] = await pool.views()
    assert view.replays == 1
    await pool.inventory.replay([view.id])
    assert (await pool.served()).headers["x-osrdyne-replay"] == 2


class CrashingPublisher(LeaderPublisher):
    """The daemon dies when the broker has the message: nothing after it happens."""

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        await super().publish(message, exchange=exchange, routing_key=routing_key, mandatory=mandatory)
        raise BrokerUnavailableError("The connection was lost.")


async def test_crash_in_a_replay_duplicates_and_loses_nothing(pool):
    await pool.poison(Message(b"one"))
    await pool.poison(Message(b"two"))
    names = [view.id for view in await pool.views()]
    await pool.serve("k")
    # The channel is lost while entries are being read: everything is given back.
    opened = []

    async def open_channel():
        opened.append(await pool.connection.channel())
        return opened[-1]

    async def lose(*_, **__):
        await opened[-1].close()
        raise BrokerUnavailableError("The channel was lost.")

    with pytest.MonkeyPatch.context() as patch:  # of the same inventory: it knows what is still on its way back
        patch.setattr(pool.inventory, "_open_channel", open_channel)
        patch.setattr(pool.inventory, "_publish_again", lose)
        with pytest.raises(BrokerUnavailableError):
            await pool.inventory.replay(names[:1])
    assert [view.id for view in await pool.views()] == names
    crashing = CrashingPublisher(pool.channel, pool.connection, clock=SystemClock())
    with pytest.raises(BrokerUnavailableError):
        await pool.make_inventory(crashing).replay(names)
    assert [view.id for view in await pool.views()] == names
    assert await pool.served() is not None
    assert await pool.served() is None


async def test_drop_removes_what_is_named_and_nothing_else(pool):
    await pool.many(5)
    views = await pool.views()
    outcome = await pool.inventory.drop([views[1].id, "nothing", views[3].id[:8]])
    assert set(outcome.done) == {views[1].id, views[3].id[:8]}
    assert outcome.missing == ("nothing",)
    assert await pool.views() == [views[0], views[2], views[4]]
    with pytest.raises(PoisonNotFoundError):
        await pool.inventory.entry(views[1].id)


async def test_entries_are_found_by_key_path_and_age(pool):
    hour_ago = int(SystemClock().time() * 1000) - 3_600_000
    await pool.poison(Message(b"1", {"x-rpc-path": "/a"}), "k1", hour_ago)
    await pool.poison(Message(b"2", {"x-rpc-path": "/b"}), "k1", hour_ago + 3_000_000)
    await pool.poison(Message(b"3", {"x-rpc-path": "/a"}), "k2", hour_ago + 3_000_001)
    found = {
        name: [view.body for view in await pool.views(bodies=True, **{name: value})]
        for name, value in {"keys": {"k1"}, "path": "/a", "older_than": 1800, "newer_than": 1800}.items()
    }
    assert found == {"keys": [b"1", b"2"], "path": [b"1", b"3"], "older_than": [b"1"], "newer_than": [b"2", b"3"]}


async def test_entry_that_was_read_often_is_renewed(pool):
    await pool.many(3)
    eager = pool.make_inventory(pool.publisher, renew_at=3)
    before = await pool.views(bodies=True)
    # What counts as a delivery on every version is a lost channel.
    for _ in range(3):
        channel, taken = await pool.connection.channel(), 0
        while taken < 3:  # what the channel before had is given back a little later
            taken += await channel.get(pool.names.poison_queue) is not None
        await channel.close()

    async def total():
        return (await eager.page(PoisonQuery())).total

    await until(total, equals=3)  # RabbitMQ gives back what the last channel had a little later
    assert await pool.views(bodies=True) == before
    delivery = await (await pool.connection.channel()).get(pool.names.poison_queue)
    assert int(str(delivery.headers.get("x-delivery-count", 0))) < 3


HOSTILE = [
    Message(),
    Message(headers={KEY_HEADER: 5, LAST_AT_HEADER: "soon", UNIQUE_HEADER: [1], DEATHS_HEADER: 1.5}),
    Message(headers={DEATHS_HEADER: '[1, {"at": "x", "log_lines": {}, "others": true}, null]'}),
    Message(headers={DEATHS_HEADER: "[" * 50_000}),
    Message(b"\xff", {KEY_HEADER: b"\xff", "x\udcff": b"\xfe"}, correlation_id="\udcff"),
    Message(headers={KEY_HEADER: "k" * 300}),
    Message(headers={LAST_AT_HEADER: -(2**62), KEY_HEADER: "k"}),
    Message(headers={"f": float("nan"), "deep": {"a": [{"b": [1, None]}]}}),
]


async def test_hostile_messages_are_shown_and_can_be_dropped(pool):
    for message in (*HOSTILE, HOSTILE[0]):
        await pool.put(message)
    views = await pool.views(bodies=True)
    ids = {view.id for view in views}
    assert len(ids) == len(HOSTILE) + 1
    assert {view.id for view in await pool.views()} == ids
    replay = await pool.inventory.replay([view.id for view in views if view.key is None or len(view.key) > 100])
    assert (replay.done, len(replay.refused)) == ((), len(HOSTILE) - 1)
    assert len((await pool.inventory.drop(list(ids))).done) == len(views)
    assert await pool.views() == []


async def test_huge_headers_make_room_for_ours(pool):
    deaths = [replace(DEATH, log_lines=("y" * 10_000,) * 20)] * 30
    for size in (100_000, 119_000, 125_000, 130_000):
        delivery = await pool.caught(Message(b"body", {"huge": "x" * size, "small": 1}), "k")
        await pool.put(poison_entry(delivery, deliveries=6, now_ms=NOW_MS, deaths=deaths))
        [view] = await pool.views(bodies=True)
        assert (view.key, view.body, view.headers["small"]) == ("k", b"body", 1)
        assert ("huge" in view.headers) == (size < 120_000)
        assert view.headers.get("x-osrdyne-poison-left-out") == (None if size < 120_000 else "huge")
        await pool.inventory.drop([view.id])


async def test_forged_marks_in_a_request_are_not_believed(pool):
    forged: dict[str, object] = {KEY_HEADER: "other", DEATHS_HEADER: '[{"worker_id": "forged"}]', UNIQUE_HEADER: "u"}
    delivery = await pool.caught(Message(headers=forged), "k")
    await pool.put(poison_entry(delivery, deliveries=6, now_ms=NOW_MS))
    [view] = await pool.views()
    assert (view.key, view.deaths, view.headers) == (Key("k"), (), {})

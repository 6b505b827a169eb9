"""A daemon in this process, on a real RabbitMQ, with the noop driver: what its terms do to queues and requests."""

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from broker_api import close_connections, ready_in, until, waiting_in

from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import Channel, Message
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.management.client import MAX_PAGE_SIZE, ManagementClient
from osrdyne.broker.topology.declarations import pool_topology, request_queue_arguments
from osrdyne.config.models import ApiSettings, BrokerSettings, DriverSettings, LifecycleSettings, PoolSettings, Settings
from osrdyne.daemon.daemon import Daemon
from osrdyne.daemon.term import StopRequest, Term
from osrdyne.errors import BrokerNotFoundError
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import decode_text
from osrdyne.testing.fakes.verbs import LeaderVerbs

SOON = 120.0
FULL_FRAME = 130_975
"""A header of so many bytes still fits into a frame, beside the others of a request, but not beside one more."""
QUICK = LifecycleSettings(unbind_delay=1.0, stop_delay=1.0, settle_delay=1.0)


def settings_of(broker: BrokerSettings, pool: str, lifecycle: LifecycleSettings | None = None) -> Settings:
    return Settings(
        pool=PoolSettings(id=pool),
        broker=broker,
        driver=DriverSettings(name="noop"),
        lifecycle=lifecycle or LifecycleSettings(),
        api=ApiSettings(port=0),
    )


class Running(LeaderVerbs):
    """A daemon at work, and a client beside it."""

    def __init__(self, daemon: Daemon, task: asyncio.Task[None]) -> None:
        self.daemon, self.task = daemon, task

    @property
    def term(self) -> Term:  # read-only
        term = self.daemon.term
        assert term is not None
        return term

    async def leads(self, *, after: int = 0) -> int:
        """Wait until it leads in a later term; its number."""

        def leads() -> bool:
            assert not self.task.done()
            return self.daemon.term is not None and self.generation.term > after

        await until(leads)
        return self.generation.term


@asynccontextmanager
async def daemon_of(settings: Settings) -> AsyncIterator[Running]:
    stop = StopRequest(asyncio.Event())
    daemon = Daemon(settings, clock=SystemClock())
    running = Running(daemon, asyncio.create_task(daemon.serve(stop)))
    try:
        await running.leads()
        yield running
    finally:
        stop.requested.set()
        await asyncio.wait_for(running.task, SOON)


@pytest.fixture
def settings(broker_settings, pool_id):
    return settings_of(broker_settings, pool_id)


@pytest.fixture
def names(pool_id):
    return PoolNames(pool_id)


async def publish(channel: Channel, names: PoolNames, key: str, body: bytes = b"1", **properties: object) -> None:
    message = Message(body=body, **properties)
    await channel.publish(message, exchange=names.requests_exchange, routing_key=key, mandatory=True)


async def take(channel: Channel, queue: str, count: int) -> list[bytes]:
    """The next bodies of a queue that will exist soon."""
    # RabbitMQ 3.10 ends the connection (541) that consumes a queue in the moment of its declaration.
    await until(lambda: waiting_in(channel._connection, queue))
    reading = await channel._connection.channel()
    consumer = await reading.consume(queue)
    bodies = []
    async with asyncio.timeout(SOON):
        for _ in range(count):
            delivery = await consumer.get()
            bodies.append(delivery.body)
            await delivery.ack()
    await reading.close()
    return bodies


async def test_orphans_are_forwarded_in_their_order_and_what_follows_goes_straight(settings, names, channel):
    key, bodies = Key("infra=42,timetable=24"), [b"%d" % number for number in range(200)]
    await declare_topology(channel, pool_topology(names.pool))
    for body in bodies:
        await publish(channel, names, key, body)
    async with daemon_of(settings) as running:
        assert await take(channel, names.request_queue(key), 200) == bodies
        await publish(channel, names, key, b"2")
        assert await take(channel, names.request_queue(key), 1) == [b"2"]
        forwarded = running.daemon._metrics.registry.get_sample_value("osrdyne_orphans_total", {"outcome": "forwarded"})
        assert forwarded == 200.0


@pytest.mark.proves("reference-defects/11-reconnection-restarted-every")
async def test_leader_that_loses_its_connection_leads_again_and_loses_nothing(settings, names, channel, broker):
    sent: list[bytes] = []

    async def keep_publishing():
        while True:
            body = b"%d" % len(sent)
            await publish(channel, names, f"k{len(sent) % 20}", body)
            sent.append(body)
            await asyncio.sleep(0.01)  # not so many that to read them takes longer than everything else

    async with daemon_of(settings) as running:
        publishing = asyncio.create_task(keep_publishing())
        term = await running.leads()
        for purpose in ("leader", "publisher"):
            await close_connections(broker.management_uri, name=f"osrdyne {names.pool} {purpose}")
            term = await running.leads(after=term)
        publishing.cancel()
        await asyncio.wait({publishing})
        assert await everything(channel, names, running, len(sent)) >= set(sent)
        assert term >= 3


async def everything(channel: Channel, names: PoolNames, running: Running, count: int) -> set[bytes]:
    """All bodies in all request queues, once no orphan is left."""
    found: set[bytes] = set()
    keys = [Key(f"k{number}") for number in range(min(20, count))]
    await running.leads()
    await until(lambda: all(running.queue_of(key).is_bound for key in keys))
    reading = await channel._connection.channel()
    while len(found) < count:
        for key in keys:
            while (delivery := await reading.get(names.request_queue(key))) is not None:
                found.add(delivery.body)
                await delivery.ack()
    return found


async def come_and_go(channel: Channel, names: PoolNames) -> None:
    """Request queues are declared and deleted all the time, at all places of the order of names."""
    for number in itertools.count():
        queue = names.request_queue(Key(f"{number * 7 % 10} churn {number}"))
        await channel.declare_queue(queue, arguments={"x-queue-type": "quorum"})
        await channel.delete_queue(queue)


@pytest.mark.proves("broker/pool-more-500-queues")
async def test_idle_groups_go_and_their_queues_with_them_while_others_come_and_go(
    broker_settings, names, channel, monkeypatch
):
    """lifecycle: "Unbinding an idle group" to "Deleting a queue" with real time: unbound, settled, listed as empty,
    probed, deleted.

    A page of a listing holds 500 queues; here it holds fewer than the pool has, so that listings go the way of pools
    with more than 500. While queues come and go, no two pages of RabbitMQ fit together.
    """
    defaults = ManagementClient.list_queues.__kwdefaults__
    assert defaults == {"page_size": MAX_PAGE_SIZE}
    monkeypatch.setitem(defaults, "page_size", 4)
    keys = [Key(f"{number} idle") for number in range(10)]
    async with daemon_of(settings_of(broker_settings, names.pool, QUICK)) as running:
        # A queue that is idle and has a request is bound again.
        await publish(channel, names, "full")
        await until(lambda: running.status_of(Key("full")) is GroupStatus.UNBOUND)
        await until(lambda: running.status_of(Key("full")) is GroupStatus.ACTIVE)
        assert await take(channel, names.request_queue(Key("full")), 1) == [b"1"]
        for key in keys:
            await publish(channel, names, key)
        for key in keys:
            assert await take(channel, names.request_queue(key), 1) == [b"1"]
        churn = asyncio.create_task(come_and_go(await channel._connection.channel(), names))
        await until(lambda: not running.groups() and not running.known_queues())
        assert not churn.done()
        churn.cancel()
        for key in keys:
            with pytest.raises(BrokerNotFoundError):
                await (await channel._connection.channel()).declare_queue(names.request_queue(key), passive=True)
        await publish(channel, names, keys[0], b"again")
        assert await take(channel, names.request_queue(keys[0]), 1) == [b"again"]


async def test_state_of_the_groups_survives_a_restart(settings, names, channel, management):
    """lifecycle: listed-bindings-are-unknown: bound, or with requests, is active; the others are unbound. All from the
    broker alone."""
    await declare_topology(channel, pool_topology(names.pool))
    for key in (Key("bound"), Key("full"), Key("empty")):
        await channel.declare_queue(names.request_queue(key), arguments=request_queue_arguments(names, key))
    await channel.bind_queue(names.request_queue(Key("bound")), names.requests_exchange, "bound")
    await channel.publish(Message(body=b"1"), exchange="", routing_key=names.request_queue(Key("full")))

    async def listed():  # some seconds later
        return [queue.ready for queue in await management.list_queues(names.request_queue(Key("full")))]

    await until(listed, equals=[1])
    async with daemon_of(settings) as running:
        keys = running.groups()
        assert {key: running.status_of(key) for key in keys} == {
            "bound": GroupStatus.ACTIVE,
            "full": GroupStatus.ACTIVE,
            "empty": GroupStatus.UNBOUND,
        }
        await until(lambda: running.queue_of(Key("full")).is_bound)


async def test_foreign_queue_of_the_name_costs_only_its_own_key(settings, names, channel):
    """defects: one-failure-for-all: one failed queue job crashed the controller for all keys, again and again."""
    await channel.declare_queue(names.request_queue(Key("a")), arguments={"x-queue-type": "classic"})
    replies = f"{names.pool}-replies"
    await channel.declare_queue(replies)
    async with daemon_of(settings) as running:
        await publish(channel, names, "a", reply_to=replies)
        await publish(channel, names, "b", b"2")
        assert await take(channel, names.request_queue(Key("b")), 1) == [b"2"]
        assert await answers(channel, replies, 1) == ["start-failed"]
        assert await running.leads() == 1


HOSTILE: list[tuple[dict[str, object], str | None]] = [
    ({"headers": {"x-filler": "x" * FULL_FRAME}}, "invalid"),
    ({"headers": {"x-deadline": 253_402_300_799_000}}, None),  # in the year 9999
    ({"headers": {"x-deadline": float("nan"), "x-osrdyne-hops": -1}}, None),
    ({"headers": {"x-osrdyne-hops": 2**60}}, "rejected"),
    ({"expiration": "0"}, "expired"),
    ({"correlation_id": "\udcff"}, None),
]
"""Properties of a request, and its answer if it does not reach its queue."""
HOSTILE_DEAD_LETTERS: list[dict[str, object]] = [
    {},
    {"x-death": [{"reason": "{0}{x}", "queue": "q"}]},
    {"x-death": [{"reason": "r" * (FULL_FRAME - 100), "queue": "q"}]},
    {"x-death": [{"reason": "delivery_limit", "queue": "q"}], "x-filler": "x" * (FULL_FRAME - 200)},
    {"x-death": [{"reason": 1}]},
    {"x-death": [{"reason": struct.pack(">d", 1.0), "queue": b"q"}]},
]


@pytest.mark.proves("hostile/hostile-messages-any-queue")
async def test_whatever_a_client_sends_the_term_goes_on_and_other_keys_are_served(settings, names, channel):
    replies = f"{names.pool}-replies"
    await channel.declare_queue(replies)

    async def send(key, **properties):
        await publish(channel, names, key, b"hostile", reply_to=replies, **properties)

    async with daemon_of(settings) as running:
        for number, (properties, status) in enumerate(HOSTILE):
            await send(f"key {number}", **properties)
            if status is None:
                assert await take(channel, names.request_queue(Key(f"key {number}")), 1) == [b"hostile"]
            else:
                assert await answers(channel, replies, 1) == [status], properties
        # RabbitMQ's CC header delivers to further queues; forwarding must not do so with our permissions.
        await send("copied", headers={"CC": [names.poison_queue]})
        assert await take(channel, names.request_queue(Key("copied")), 1) == [b"hostile"]
        assert await ready_in(channel, names.poison_queue) == 0
        # Anybody who may publish to the dead letter exchange may send what never died.
        for headers in HOSTILE_DEAD_LETTERS:
            message = Message(body=b"1", headers=headers, reply_to=replies)
            await channel.publish(message, exchange=names.dead_letter_exchange, routing_key="a")
            assert len(await answers(channel, replies, 1)) == 1, headers
        # Neither key nor reply address is UTF-8.
        await publish(channel, names, "\udcff", reply_to="\udcfe")
        await send("\udcff\udc80")
        assert await answers(channel, replies, 1) == ["invalid"]
        await publish(channel, names, "good", b"good")
        assert await take(channel, names.request_queue(Key("good")), 1) == [b"good"]
        assert await running.leads() == 1


async def answers(channel: Channel, queue: str, count: int) -> list[str | None]:
    """The statuses of the next answers."""
    reading = await channel._connection.channel()
    consumer = await reading.consume(queue, no_ack=True)
    async with asyncio.timeout(SOON):
        deliveries = [await consumer.get() for _ in range(count)]
    await reading.close()
    return [decode_text(delivery.headers.get("x-status")) for delivery in deliveries]

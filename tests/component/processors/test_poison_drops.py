"""PoisonMessageDrop: copies of poison requests, sent once beside the inventory. In virtual time."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
import structlog
from managed_pool import send
from replies import REPLIES, answers, broker_with_replies

from osrdyne.amqp import Connection, Delivery, Message
from osrdyne.ingress.policies.manifest import load_policies
from osrdyne.ingress.policies.poison_drop import parse_poison_drop
from osrdyne.metrics import Metrics
from osrdyne.processors.failures import poison_drop
from osrdyne.processors.failures.poison_drop import PoisonDrops
from osrdyne.protocol.names import Key
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.context import make_context
from osrdyne.testing.fakes.stack import Stack

SECRET = "token=hidden"
URL = f"https://example.org/hook?{SECRET}"
PUBLIC = ["93.184.216.34"]


@pytest.fixture
def broker(clock):
    broker = broker_with_replies(clock)
    broker.declare_queue("failed", {})
    return broker


async def poison(stack: Stack, drop: str, limit: int = 2) -> None:
    """A request that kills each worker that takes it."""
    policy = {"match": "a", "MaxDequeueRetries": limit, "PoisonMessageDrop": drop}
    await stack.term.routing.policies.change(load_policies(json.dumps({"policies": [policy]})), author="me")
    await send(stack, "a", b"poison", reply_to=REPLIES, correlation_id="c", headers={"authorization": "secret"})
    for _ in range(limit):
        delivery = await stack.take("a")
        await delivery.channel.close()
    await stack.clock.advance(5.0)


async def test_copy_is_sent_once_at_the_limit_of_the_key_beside_the_inventory(stack, broker):
    await poison(stack, "amqp:/queues/failed")
    assert (answers(broker), broker.bodies("pool-poison")) == ([("c", "delivery_limit")], [b"poison"])
    (copy,) = broker.queues["failed"].ready
    assert (copy.message.body, copy.message.reply_to) == (b"poison", None)
    assert copy.message.headers["x-osrdyne-poison-deliveries"] == 2
    assert "authorization" not in copy.message.headers


@pytest.mark.parametrize("drop", ["amqp:/queues/missing", "amqp:/exchanges/missing", "amqp:/queues/pool-orphan"])
async def test_copy_that_cannot_be_sent_ends_nothing(stack, broker, drop):
    await poison(stack, drop)
    assert (answers(broker), broker.bodies("pool-poison")) == ([("c", "delivery_limit")], [b"poison"])
    assert stack.metrics.registry.get_sample_value("osrdyne_poison_drops_total", {"outcome": "failed"}) == 1.0
    assert stack.orphans() == []


class Endpoint:
    """Answers every request with this, or raises it; and keeps what it has got."""

    def __init__(self, answer: int | Exception = 204) -> None:
        self.answer = answer
        self.metrics = Metrics()
        self.seen: list[httpx.Request] = []

    def outcome(self, name: str) -> float:
        """The copies with this outcome."""
        return self.metrics.registry.get_sample_value("osrdyne_poison_drops_total", {"outcome": name}) or 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return httpx.Response(self.answer, headers={"location": "https://example.org/else"})


@asynccontextmanager
async def sending(
    clock: VirtualClock, endpoint: Endpoint, addresses: Sequence[str] = PUBLIC
) -> AsyncIterator[PoisonDrops]:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    async def no_connection() -> Connection:
        raise AssertionError("no AMQP is needed")

    drops = PoisonDrops(
        make_context(pool="pool", clock=clock, metrics=endpoint.metrics),
        drop_of=lambda key: parse_poison_drop(URL),
        connect=no_connection,
        resolve=resolve,
        transport=httpx.MockTransport(endpoint),
    )
    running = asyncio.ensure_future(drops.run())
    yield drops
    running.cancel()
    await asyncio.wait({running})


def delivery(broker: FakeBroker, correlation_id: str = "c") -> Delivery:
    properties = Message(content_type="text/plain", correlation_id=correlation_id).properties()
    return Delivery(FakeChannel(broker), 1, "", "a", False, b"body", properties)


async def submit(clock: VirtualClock, drops: PoisonDrops, broker: FakeBroker, correlation_id: str = "c") -> None:
    drops.submit(Key("a/é"), delivery(broker, correlation_id), reason="delivery_limit", deliveries=3)
    await clock.settle()


async def test_request_is_posted_to_the_resolved_address(clock, broker):
    endpoint = Endpoint()
    async with sending(clock, endpoint) as drops:
        await submit(clock, drops, broker, b"\xff/\xc3\xa9".decode("utf-8", "surrogateescape"))
        (request,) = endpoint.seen
        assert request.headers["x-osrdyne-correlation-id"] == "%FF%2F%C3%A9", "it keeps its bytes"
        assert str(request.url) == f"https://{PUBLIC[0]}/hook?{SECRET}"
        assert (request.headers["host"], request.extensions["sni_hostname"]) == ("example.org", "example.org")
        assert (request.content, request.headers["content-type"]) == (b"body", "text/plain")
        assert request.headers["x-osrdyne-key"] == "a%2F%C3%A9"
        assert endpoint.outcome("sent") == 1.0


@pytest.mark.proves("managed/receiver-copy-poison-request")
@pytest.mark.parametrize("answer", [302, 404, 500, httpx.ConnectError(f"no connection to {URL}")], ids=str)
async def test_refused_copy_is_sent_once_and_no_secret_logged(clock, broker, answer):
    endpoint = Endpoint(answer)
    with structlog.testing.capture_logs() as logs:
        async with sending(clock, endpoint) as drops:
            await submit(clock, drops, broker)
            await clock.advance(3600.0)
            assert (len(endpoint.seen), endpoint.outcome("failed")) == (1, 1.0)
    assert "hidden" not in str(logs)
    assert "https://example.org:443" in str(logs)


@pytest.mark.proves("managed/receiver-copy-poison-request")
@pytest.mark.parametrize("addresses", [["127.0.0.1"], [*PUBLIC, "169.254.169.254"], ["::1"], []])
async def test_local_addresses_are_refused(clock, broker, addresses):
    endpoint = Endpoint()
    async with sending(clock, endpoint, addresses) as drops:
        await submit(clock, drops, broker)
        assert (endpoint.seen, endpoint.outcome("failed")) == ([], 1.0)


@pytest.mark.proves("managed/receiver-copy-poison-request")
@pytest.mark.parametrize(("name", "limit"), [("MAX_WAITING", 3), ("MAX_WAITING_BYTES", 3 * len(b"body"))])
async def test_copies_that_wait_are_bounded(clock, broker, monkeypatch, name, limit):
    monkeypatch.setattr(poison_drop, name, limit)
    endpoint = Endpoint()
    async with sending(clock, endpoint) as drops:
        for _ in range(10):
            drops.submit(Key("a"), delivery(broker), reason="poison", deliveries=1)
        assert endpoint.outcome("dropped") == 7.0
        await clock.settle()
        assert endpoint.outcome("sent") == 3.0

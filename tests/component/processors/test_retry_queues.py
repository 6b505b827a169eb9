"""Where failed requests wait, and how they come back: a real leader on a broker in memory, in virtual time."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import structlog
from broker_steps import kill_within
from managed_pool import REST, change, managed, managing, publish_to, send, waiting
from replies import REPLIES, answers, broker_with_replies

from osrdyne.amqp import ConnectionOptions, Delivery
from osrdyne.broker.management.models import QueueTotals
from osrdyne.broker.queues.safe_delete import DeleteOutcome
from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.errors import BrokerConflictError, BrokerError
from osrdyne.pool.routing.retries import POLL_INTERVAL, RetryQueueStep, Unused, plan_retry_queue
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import HOPS_HEADER
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.retries import ATTEMPTS_HEADER, CLASS_HEADER, DELAY_HEADER, OWN_HEADERS, TERMS_HEADER
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel, FakeConnection
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, make_stack
from osrdyne.testing.keys import ODD_KEYS
from osrdyne_worker.requests.retries import Retries, Retry
from osrdyne_worker.runtime.connection import BrokerConnection

NAMES = PoolNames(POOL)
RETRY = {"codes": ["5xx"], "max_attempts": 3, "delays": [1, 30]}
TEXT = "FROM /messages/* INTO $upstream"
PLAIN = {"route": TEXT, "retry": RETRY}
URGENT = {**PLAIN, "priority": 3}
TTL = managed().requests.ttl
WAIT = NAMES.retry_queue(1000)
A = Key("a")


@pytest.fixture
async def stack(stack):
    await change(stack, plain=PLAIN)
    return stack


async def take(stack: Stack, key: str = "a", priority: int | None = None) -> Delivery:
    queue = stack.names.request_queue(Key(key), priority)
    consumer = await FakeChannel(stack.broker).consume(queue, prefetch=1)
    return await consumer.get()


async def send_and_fail(stack: Stack, **properties: object) -> None:
    """A request waits for its second attempt."""
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c", **properties)
    await fail(stack)


async def fail(stack: Stack, key: str = "a", priority: int | None = None, *, attempts: int = 1) -> None:
    """A worker takes a request, and sends it to wait for a second."""
    delivery = await take(stack, key, priority)
    connection = FakeConnection(stack.broker, ConnectionOptions("amqp://fake"))
    broker_connection = BrokerConnection(connection, await connection.channel(confirms=True), stack.clock)
    request = delivery.to_request(now_ms=round(stack.clock.time() * 1000))
    assert await Retries(NAMES.retry_exchange).send(broker_connection, delivery, request, Retry(1000, attempts))
    await delivery.ack()
    await delivery.channel.close()


async def time_out(stack: Stack) -> None:
    """The second is over."""
    stack.broker.expire(WAIT)
    await stack.clock.settle()


def bound_to(broker: FakeBroker, delay: int = 1000) -> list[str]:
    """Where a request waits for its next attempt."""
    return broker.route(NAMES.retry_exchange, "a", {DELAY_HEADER: str(delay)})


def headers_of(stack: Stack, priority: int | None = None) -> dict[str, object]:
    [stored] = stack.broker.queues[stack.names.request_queue(A, priority)].ready
    return dict(stored.message.headers)


@pytest.mark.parametrize("routes", [{"urgent": URGENT}, {"rest": REST}, {}], ids=["retries", "no retries", "no routes"])
async def test_terms_are_those_of_the_route_and_callers_cannot_set_them(clock, broker, routes):
    async with managing(clock, broker, **routes) as stack:
        await send(stack, "a", headers=dict.fromkeys(OWN_HEADERS, "forged"))
        headers = headers_of(stack, 3 if "urgent" in routes else None)
        terms = {TERMS_HEADER: '{"codes":["5xx"],"max_attempts":3,"delays_ms":[1000,30000]}', CLASS_HEADER: "3"}
        assert {name: headers[name] for name in headers.keys() & OWN_HEADERS} == (terms if "urgent" in routes else {})


@pytest.mark.parametrize("priority", [None, 3])
async def test_request_comes_back_to_its_priority_level_as_it_was(stack, priority):
    await change(stack, plain=PLAIN if priority is None else URGENT)
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c", headers={"x-own": "kept"})
    before = headers_of(stack, priority)
    await fail(stack, priority=priority)
    assert (waiting(stack, priority), stack.broker.bodies(WAIT)) == ([], [b"1"])
    await time_out(stack)
    [stored] = stack.broker.queues[stack.names.request_queue(A, priority)].ready
    assert (stored.message.reply_to, stored.message.correlation_id, stored.routing_key) == (REPLIES, "c", "a")
    assert headers_of(stack, priority).items() >= {k: v for k, v in before.items() if k != HOPS_HEADER}.items()


async def test_every_odd_key_finds_its_queue_again(stack, clock):
    await change(stack, urgent=URGENT)
    for key in ODD_KEYS.values():
        await stack.publish(key, key.encode())
    await clock.settle()
    for key in ODD_KEYS.values():
        await fail(stack, key, 3)
    await time_out(stack)
    for key in ODD_KEYS.values():
        assert waiting(stack, 3, key) == [key.encode()]


@pytest.mark.proves("managed/group-ends-request-waits")
async def test_group_that_is_gone_meanwhile_is_started_again_for_it(stack, broker):
    await change(stack, urgent=URGENT)
    await send(stack, "a", b"1", reply_to=REPLIES)
    deadline = headers_of(stack, 3)[DEADLINE_HEADER]
    await fail(stack, priority=3, attempts=2)
    stack.retire(A)
    await stack.clock.advance(120.0)
    assert not stack.has_queue("a")
    await time_out(stack)
    headers = headers_of(stack, 3)
    assert (headers[ATTEMPTS_HEADER], headers[CLASS_HEADER], headers[DEADLINE_HEADER]) == (2, "3", deadline)
    assert (stack.running("a"), stack.orphans(), answers(broker)) == (1, [], [])


async def test_unknown_priority_level_does_not_end_the_term(stack):
    """A worker with a user of its own may send to wait what it likes; of such a class there is no exchange."""
    await publish_to(stack, NAMES.retried_exchange, "a", b"1", headers={CLASS_HEADER: "7"})
    await stack.clock.advance(60.0)
    assert (waiting(stack, 7), stack.orphans(), stack.task.done()) == ([b"1"], [], False)


@pytest.mark.proves("managed/request-kills-worker-later")
async def test_request_that_kills_workers_at_a_later_attempt_is_poison(stack, broker):
    await send_and_fail(stack)
    await time_out(stack)
    for _ in range(managed().requests.delivery_limit):
        await (await take(stack)).channel.close()
    await stack.clock.advance(60.0)
    assert answers(broker) == [("c", "delivery_limit")]
    assert broker.bodies(NAMES.poison_queue) == [b"1"]


async def test_new_delays_have_a_persisted_queue_when_the_change_is_reported(stack, broker):
    """Decision 0020: it is persisted before it is bound."""
    new = NAMES.retry_queue(300_000)
    broker.commands.clear()
    await change(stack, plain={**PLAIN, "retry": RETRY | {"delays": ["1s", "PT5M"]}})
    found = [delay for delay in (1000, 30_000, 300_000) if NAMES.retry_queue(delay) in broker.queues]
    assert (found, bound_to(broker, 300_000)) == ([1000, 30_000, 300_000], [new])
    commands = [(command.name, command.target) for command in broker.commands]
    names = NAMES.register_queues(1)
    written = [commands.index(("declare", name)) for name in names if ("declare", name) in commands]
    assert commands.index(("declare", new)) < min(written) < commands.index(("bind", new))


@pytest.mark.proves("managed/queue-delay-exists-arguments")
async def test_queue_that_is_not_ours_refuses_the_change(clock, broker):
    broker.declare_queue(WAIT, {"x-queue-type": "quorum"})
    async with managing(clock, broker, rest=REST) as stack:
        with pytest.raises(BrokerConflictError, match="pool-retry-1000"):
            await change(stack, plain=PLAIN)
        assert [kept.version for kept in await stack.term.routing.routes.history()] == [1]
        await send(stack, "a", b"1")
        assert waiting(stack, None) == [b"1"]


@pytest.mark.proves("managed/queue-delay-exists-arguments")
async def test_retries_are_off_until_the_foreign_queue_is_deleted(clock, broker):
    """Those of a kept route; other routes have theirs."""
    urgent = {**URGENT, "route": "FROM /* WHERE x = '1' INTO $upstream", "retry": RETRY | {"delays": [30]}}
    async with managing(clock, broker, urgent=urgent, plain=PLAIN):
        broker.delete_queue(WAIT)
        broker.declare_queue(WAIT, {"x-queue-type": "classic"})
    unused: Any = None
    more = dict.fromkeys(("driver", "management", "pins", "leader"), unused)
    with structlog.testing.capture_logs() as logs:
        async with managing(clock, broker) as stack:
            await send(stack, "a", headers={"x": "1"})
            assert TERMS_HEADER in headers_of(stack, 3)
            inspector = DaemonInspector(pool=POOL, state=DaemonState(term=stack.term), prices={}, clock=clock, **more)
            [component] = [one for one in inspector.components() if one.name == "retries"]
            assert (component.ok, component.fatal) == (False, False)
            assert ("plain" in component.detail, WAIT in component.detail) == (True, True)
            assert stack.term.routing.routes.retries_off.keys() == {"plain"}
            changed = await change(stack, plain=PLAIN)
            assert [(one.path, WAIT in one.message) for one in changed.warnings] == [("routes.plain", True)]
            broker.delete_queue(WAIT)
            await clock.advance(POLL_INTERVAL + 1)
            assert bound_to(broker) == [WAIT]
            await send(stack, "a", b"1")
            assert (TERMS_HEADER in headers_of(stack), stack.term.routing.routes.retries_off) == (True, {})
    assert "plain" in [entry["route"] for entry in logs if entry["log_level"] == "error"]


@pytest.mark.proves("managed/queue-delay-retry-exchange")
async def test_wait_queue_is_declared_also_after_its_deletion(clock, broker):
    for name in NAMES.register_queues(1):
        broker.declare_queue(name, {"x-queue-type": "classic"})
    async with managing(clock, broker, plain=PLAIN):
        assert bound_to(broker) == [WAIT]
        broker.delete_queue(WAIT)
        await clock.advance(POLL_INTERVAL + 1)
        assert bound_to(broker) == [WAIT]


@pytest.mark.proves("managed/route-retries-changed-removed")
async def test_unused_queue_goes_when_no_accepted_request_can_need_it(stack, broker):
    await change(stack, rest=REST)
    await stack.clock.advance(TTL - 1)
    assert bound_to(broker) == [WAIT]
    await stack.clock.advance(4 * POLL_INTERVAL)
    assert [name for name in broker.queues if name.startswith(NAMES.retry_queue_prefix)] == []


@pytest.mark.proves("managed/route-retries-changed-removed")
async def test_unused_queue_stays_while_a_request_waits_in_it(stack, broker):
    """For longer than it should; in the end its time is up, and that is the answer to its caller."""
    await send_and_fail(stack)
    await change(stack, rest=REST)
    await stack.clock.advance(TTL + 5 * POLL_INTERVAL)
    assert (broker.bodies(WAIT), stack.term.routing.routes.retrying[1000]) == ([b"1"], 1)
    await time_out(stack)
    assert answers(broker) == [("c", "expired")]
    await stack.clock.advance(3 * POLL_INTERVAL)
    assert WAIT not in broker.queues


async def test_queue_that_is_used_again_stays(stack, clock, broker):
    await change(stack, rest=REST)
    await clock.advance(TTL + POLL_INTERVAL / 2)  # it may be unbound by now
    await change(stack, plain=PLAIN)
    await clock.advance(TTL + 5 * POLL_INTERVAL)
    assert bound_to(broker) == [WAIT]


@pytest.mark.parametrize("settings", [managed(), None], ids=["managed", "direct"])
async def test_next_leader_deletes_unused_ones(clock, broker, settings):
    async with managing(clock, broker, plain=PLAIN) as stack:
        await change(stack, rest=REST)
    async with leading(clock, broker=broker, settings=settings):
        await clock.advance(TTL + 5 * POLL_INTERVAL)
        assert WAIT not in broker.queues


async def test_probe_gives_back_what_it_gets(stack, clock, broker):
    await send_and_fail(stack)
    commands = stack.term._session.retry_queues(stack.management)
    broker.queues[WAIT].ready, held = [], broker.queues[WAIT].ready
    original = broker.queues[WAIT].changed

    def late():
        """An unexpected case: a request that arrives during the probe."""
        broker.queues[WAIT].ready += held
        held.clear()
        original()

    broker.queues[WAIT].changed = late  # type: ignore[method-assign]
    assert await commands.delete_if_proven_empty(1000) is DeleteOutcome.NOT_EMPTY
    await clock.settle()
    assert waiting(stack, None) == [b"1"]


def totals(messages: int | None, sampled_after: float, *, state: str = "running") -> QueueTotals:
    return QueueTotals(WAIT, {}, messages, messages, None, state, "quorum", None, sampled_after)


@pytest.mark.parametrize(
    ("unused", "found", "step"),
    [
        (Unused(950.0), totals(0, 1000.0), RetryQueueStep.KEEP),
        (Unused(900.0), totals(5, 1000.0), RetryQueueStep.UNBIND),
        (Unused(900.0, 995.0), totals(0, 1000.0), RetryQueueStep.KEEP),
        (Unused(900.0, 990.0), totals(0, 1000.0), RetryQueueStep.DELETE),
        (Unused(900.0, 990.0), totals(1, 1000.0), RetryQueueStep.KEEP),
        (Unused(900.0, 990.0), totals(None, 1000.0), RetryQueueStep.KEEP),
        (Unused(900.0, 990.0), totals(0, 1000.0, state="down"), RetryQueueStep.KEEP),
    ],
    ids=["needed", "not needed", "unsettled", "empty", "not empty", "unknown", "down"],
)
def test_plan_of_an_unused_wait_queue(unused, found, step):
    assert plan_retry_queue(unused, found, now=1000.0, needed_for=100.0, settle_delay=10.0) is step


async def lead_and_die(clock: VirtualClock, broker: FakeBroker, number: int) -> bool:
    """A leader puts new delays in force and gives up old ones, and is killed before or after its `number`-th command on
    anything of retries, while a request waits; whether it got so far."""
    stack = make_stack(clock, broker=broker, settings=managed())
    stack.task = asyncio.create_task(stack.lead())
    await clock.advance(5.0)
    await change(stack, plain=PLAIN)
    await send_and_fail(stack)
    steps = 0

    async def hook(command: Command) -> None:
        nonlocal steps
        steps += "-retr" in command.target
        if steps == number and not stack.killed:
            kill_within(stack)

    broker.hook = hook
    with suppress(BrokerError):
        await change(stack, plain={**PLAIN, "retry": RETRY | {"delays": [7]}})
        await clock.advance(TTL + 5 * POLL_INTERVAL)
    broker.hook = None
    await stack.kill()
    return steps >= number


async def test_leader_killed_at_any_step_leaves_a_next_one_that_has_it_right():
    number = 1
    while True:
        clock = VirtualClock()
        broker = broker_with_replies(clock)
        died = await lead_and_die(clock, broker, number)
        async with managing(clock, broker, plain=PLAIN) as stack:
            await clock.advance(TTL + 5 * POLL_INTERVAL)
            queues = {name for name in broker.queues if name.startswith(NAMES.retry_queue_prefix)}
            bound = [bound_to(broker, delay) for delay in (1000, 30_000)]
            await time_out(stack)
            assert queues == {WAIT, NAMES.retry_queue(30_000)}, f"killed at step {number}"
            assert bound == [[WAIT], [NAMES.retry_queue(30_000)]], f"killed at step {number}"
            assert answers(broker) == [("c", "expired")], f"killed at step {number}"
        if not died:
            break
        number += 1
    assert number > 20

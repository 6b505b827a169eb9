"""The ingress of a managed pool: a real leader on a broker in memory, in virtual time."""

import asyncio
import json
import threading
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from broker_steps import hold, refuse
from managed_pool import ALERTS, CONTROL, COPY, DATA, REST, change, listen, managed, managing, publish_to, send, waiting
from replies import REPLIES, answers

from osrdyne.errors import BrokerSilentError, StartFailedError
from osrdyne.ingress.checks import DeliveryCheck, Refusal
from osrdyne.ingress.conditions import samples
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.pool.routing.active_manifest import FOLLOW_INTERVAL
from osrdyne.pool.routing.priorities import SEND_AGAIN_AFTER, SILENT_FOR
from osrdyne.pool.routing.routes import RouteStore
from osrdyne.pool.state.queues.backlog import Waiting
from osrdyne.processors.prefetch import PREFETCH
from osrdyne.protocol.activity import Event
from osrdyne.protocol.deadlines import DEADLINE_HEADER
from osrdyne.protocol.messages import COALESCE_HEADER, DUPLICATE_HEADER, PATH_HEADER, ROUTE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.stack import POOL, Stack, leading

A = Key("a")


@pytest.fixture
async def stack(stack):
    await change(stack, alerts=ALERTS, rest=REST)
    return stack


async def send_levels(stack: Stack, *levels: str, key: str = "a", **properties: object) -> None:
    for level in levels:
        await send(stack, key, headers={"level": level}, **properties)


def headers_of(stack: Stack, priority: int | None, key: str = "a") -> dict[str, object]:
    [stored] = stack.broker.queues[stack.names.request_queue(Key(key), priority)].ready
    return dict(stored.message.headers)


async def test_requests_and_copies_keep_their_order_within_a_priority_level(stack, clock):
    bodies = [b"%d" % number for number in range(2 * PREFETCH)]
    await change(stack, alerts=ALERTS, rest=REST, copy=COPY)
    for number, body in enumerate(bodies):
        await stack.publish("a", body, headers={"level": "alert" if number % 2 else "none"})
    await clock.settle()
    assert (waiting(stack, None), waiting(stack, 0)) == (bodies[::2], bodies[1::2])
    assert waiting(stack, 4, "b") == bodies


BY_BODY = {"route": "FROM /messages/* WHERE $body.level = 'alert' INTO $upstream", "priority": 0}


# --- The parser of JSON holds up the event loop, and with it the heartbeats of the leader


@pytest.fixture
def parsers(monkeypatch):
    """The names of the threads in which bodies are parsed."""
    found: list[str] = []
    loads = json.loads

    def note(text, **options):
        found.append(threading.current_thread().name)
        return loads(text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(samples, "json", SimpleNamespace(loads=note))
    return found


async def publish(stack: Stack, *bodies: bytes) -> None:
    for body in bodies:
        await stack.publish("a", body, content_type="application/json", content_encoding="utf-8")


async def route_all(stack: Stack, count: int) -> None:
    async with asyncio.timeout(120):
        while len(waiting(stack, 0) + waiting(stack, None)) < count:
            await stack.clock.settle()
            await asyncio.sleep(0.001)


@pytest.mark.proves("hostile/clients-send-json-bodies")
async def test_only_large_bodies_are_parsed_in_a_thread_and_not_overtaken(stack, parsers):
    bodies = [b'{"level": "data", "more": "%s"}' % (b"x" * size) for size in (100_000, 1, 200_000, 2)]
    alert = b'{"level": "alert"}'
    await change(stack, alerts=BY_BODY, rest=REST)
    await publish(stack, *bodies, alert)
    await route_all(stack, 5)
    assert (waiting(stack, None), waiting(stack, 0)) == (bodies, [alert])
    here = threading.current_thread().name
    assert sorted(thread == here for thread in parsers) == [False, False, True, True, True]


@pytest.mark.parametrize("routes", [{"rest": REST}, {"data": DATA, "rest": REST}], ids=["none", "headers"])
async def test_body_that_nothing_reads_is_not_parsed(stack, parsers, routes):
    await change(stack, **routes)
    await publish(stack, b'{"more": "%s"}' % (b"x" * 100_000))
    await route_all(stack, 1)
    assert parsers == []


@pytest.mark.parametrize(
    ("behind", "expiration", "left"),
    [(None, None, 2_000), (0, "1000", 1_000), (4, "1000", 1_000), (-4, "1000", 1_000), (0, None, 2_000)],
    ids=["route", "caller", "clock behind", "clock ahead", "no lifetime"],
)
async def test_clock_skew_extends_no_lifetime(stack, clock, behind, expiration, left):
    """Of a route with 2 s, and of a caller with 1 s. RabbitMQ ends the request when the leader's clock says so."""
    await change(stack, alerts={**ALERTS, "timeToLiveSecs": 2})
    now = clock.time()
    deadline = {} if behind is None else {DEADLINE_HEADER: round((now - behind + 1) * 1000)}
    sent = None if behind is None else datetime.fromtimestamp(now - behind, tz=UTC)
    await send(stack, "a", headers={"level": "alert", **deadline}, expiration=expiration, timestamp=sent)
    [stored] = stack.broker.queues[stack.names.request_queue(A, 0)].ready
    assert stored.message.headers[DEADLINE_HEADER] == round(now * 1000) + left
    assert stored.message.expiration == str(left)
    assert headers_of(stack, 0)[ROUTE_HEADER] == "alerts"


@pytest.mark.parametrize("coalesce", [True, False])
async def test_route_says_whether_requests_share_a_run_and_a_client_does_not(stack, coalesce):
    await change(stack, rest={"route": REST, "coalesce": coalesce})
    await send(stack, "a", headers={COALESCE_HEADER: not coalesce})
    assert headers_of(stack, None).get(COALESCE_HEADER, False) is coalesce


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [("a", {}, "no-route"), ("a", {DEADLINE_HEADER: 1}, "expired"), ("\udcff", {}, "invalid")],
    ids=["without a route", "expired", "invalid key"],
)
async def test_refused_request_is_answered_and_starts_nothing(stack, broker, key, headers, status):
    await change(stack, alerts=ALERTS)
    await send(stack, key, reply_to=REPLIES, correlation_id="c", headers=headers)
    assert (answers(broker), stack.orphans(), stack.groups()) == ([("c", status)], [], [])


@pytest.mark.parametrize("encoding", [None, "\udcff", "utf\0-8", "no such thing", "utf-8"])
@pytest.mark.proves("managed/body-not-declared-json")
async def test_answer_of_no_route_says_why_the_body_was_not_read(stack, encoding):
    await change(stack, hot="FROM /messages/* WHERE $body.temperature > 30 INTO $upstream")
    declared = {"content_type": "application/json", "content_encoding": encoding}
    await send(stack, "a", b'{"temperature": 3}', reply_to=REPLIES, correlation_id="c", **declared)
    [reply] = stack.broker.queues[REPLIES].ready
    assert (answers(stack.broker), stack.task.done()) == ([("c", "no-route")], False)
    assert (b"content encoding" in reply.message.body) is (encoding != "utf-8")


async def test_second_endpoint_gets_a_one_way_copy_unless_a_check_refuses_it(stack, broker):
    await change(stack, rest=REST, copy=COPY)
    await send(stack, "a", b"1", reply_to=REPLIES, headers={PATH_HEADER: "/sql"})
    [own] = broker.queues[stack.names.request_queue(A)].ready
    [other] = broker.queues[stack.names.request_queue(Key("b"), 4)].ready
    assert (own.message.reply_to, own.message.headers[PATH_HEADER]) == (REPLIES, "/sql")
    assert (other.message.reply_to, other.message.headers[PATH_HEADER]) == (None, b"/store")
    refusal = Refusal(Status.CAPACITY, "open")
    check = DeliveryCheck("circuit", lambda arrival, routed, now_ms: refusal if routed.key == "b" else None)
    stack.term.processors.checks.deliveries += (check,)
    await send(stack, "a", b"2", reply_to=REPLIES, correlation_id="c")
    assert (waiting(stack, None), waiting(stack, 4, "b"), answers(broker)) == ([b"1", b"2"], [b"1"], [])


@pytest.mark.parametrize(
    ("foreign", "served", "answered"), [("b", [b"1"], []), ("a", [], [("c", "start-failed")])], ids=["copy", "request"]
)
async def test_refused_copy_or_request_holds_no_place(clock, broker, foreign, served, answered):
    broker.declare_queue(f"pool-req-{foreign}", {"x-queue-type": "classic"})
    async with managing(clock, broker, rest=REST, copy=COPY) as stack:
        await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c")
        await clock.advance(1.0)
        held = [key for key in ("a", "b") if stack.is_held(Key(key))]
        assert (waiting(stack, None), answers(broker), stack.orphans(), held) == (served, answered, [], [])
        await clock.advance(7200.0)
        assert stack.places() == []


async def test_leader_killed_before_a_copy_is_confirmed_loses_no_copy(clock, broker):
    async with managing(clock, broker, rest=REST, copy=COPY) as stack:
        hold(broker, ("publish", "pool-work-xchg_Pri4", False))
        await stack.publish("a", b"1")
        await clock.advance(1.0)
        assert (waiting(stack, None), waiting(stack, 4, "b")) == ([b"1"], [])
        await stack.kill()
    broker.hook = None
    async with managing(clock, broker) as stack:
        await clock.advance(1.0)
        assert waiting(stack, 4, "b") == [b"1"]


@pytest.mark.proves("controller/leader-dies-forwarded-request", "requests/channel-closes-soon-many")
async def test_request_of_a_killed_ingress_is_passed_on_by_the_next_and_marked(stack):
    hold(stack.broker, ("publish", stack.names.work_exchange(None), True))
    await send(stack, "a", b"1")
    await stack.kill()
    stack.broker.hook = None
    async with managing(stack.clock, stack.broker) as stack:
        await stack.clock.settle()
        stored = stack.broker.queues[stack.names.request_queue(A)].ready
        assert [one.message.headers.get(DUPLICATE_HEADER) for one in stored] == [None, True]


@pytest.mark.proves("managed/leader-dies-refused-request")
async def test_refusal_that_comes_again_is_the_same_and_is_counted(clock, broker):
    """A leader answers, and is killed before it acknowledges; the request expires before there is a next one."""
    async with managing(clock, broker, alerts=ALERTS) as stack:
        hold(broker, ("ack", "pool-orphan", False))
        deadline = round(clock.time() * 1000) + 1000
        await send(stack, "a", headers={DEADLINE_HEADER: deadline}, reply_to=REPLIES, correlation_id="c")
        await stack.kill()
    broker.hook = None
    await clock.advance(3600.0)
    async with managing(clock, broker) as stack:
        await clock.settle()
        assert answers(broker) == [("c", "no-route"), ("c", "no-route")]
        assert stack.metrics.registry.get_sample_value("osrdyne_refused_again_total") == 1.0


async def test_request_whose_group_was_unbound_under_way_keeps_priority_level_and_deadline(stack):
    message = {DEADLINE_HEADER: round(stack.clock.time() * 1000) + 5_000, ROUTE_HEADER: "older", COALESCE_HEADER: True}
    await publish_to(stack, stack.names.work_exchange(0), "b", b"1", headers=message)
    found = headers_of(stack, 0, "b")
    assert found.items() >= message.items()


async def test_change_persists_the_queue_of_a_new_level_before_it_is_bound_and_moves_no_request(stack, broker):
    """Decision 0020, for a group that has its other queues already."""
    await change(stack, rest=REST)
    await send(stack, "a", b"1", headers={"level": "alert"})
    broker.commands.clear()
    await change(stack, alerts=ALERTS, rest=REST)
    await stack.clock.settle()
    commands = [(command.name, command.target) for command in broker.commands]
    new = ("declare", stack.names.request_queue(A, 0))
    written = ("declare", stack.names.register_queues(1)[1])
    bound = ("bind", stack.names.request_queue(A, 0))
    assert commands.index(new) < commands.index(written) < commands.index(bound)
    await send(stack, "a", b"2", headers={"level": "alert"})
    await change(stack, rest=REST)
    await send(stack, "a", b"3", headers={"level": "alert"})
    assert (waiting(stack, 0), waiting(stack, None)) == ([b"2"], [b"1", b"3"])


async def test_routes_that_an_earlier_leader_wrote_late_come_into_force_once_they_can_be_read(stack):
    await change(stack, rest=REST)
    late = load_manifest(json.dumps({"routes": {"alerts": ALERTS}}))
    await RouteStore(stack.management, pool=POOL).save(late, author="earlier", at=0.0)
    for available in (False, True):
        stack.management.available = available
        await stack.clock.advance(FOLLOW_INTERVAL + 1)
        await send_levels(stack, "alert")
    assert (len(waiting(stack, None)), len(waiting(stack, 0))) == (1, 1)


async def test_workers_receive_their_queues_and_a_new_one_the_most_urgent_first(stack):
    await change(stack, rest=REST)
    await send(stack, "a", b"1")
    listen(stack, "group.a")
    await stack.report("a", Event.READY)
    await change(stack, alerts=ALERTS, rest=REST)
    await send(stack, "b")
    await stack.clock.advance(1.0)
    queues_sent = [json.loads(body)["queues"] for body in stack.broker.bodies(CONTROL)]
    assert (queues_sent[0], queues_sent[-1]) == (["pool-req-a"], ["pool-req-a_Pri0", "pool-req-a"])
    [started] = stack.driver.workers_of(Key("b"))
    assert started.spec.environment.requests_queues == ("pool-req-b_Pri0", "pool-req-b")


async def test_worker_that_never_reports_for_priorities_is_warned_about(stack, clock):
    await stack.publish("old", b"1")
    await send(stack, "new", b"1")
    await stack.report("old", Event.REQUEST_RECEIVED)
    await stack.report("new", Event.IDLE, in_flight=0)
    await clock.advance(SILENT_FOR / 2)
    assert stack.term.routing.routes.levels.silent == {}
    await clock.advance(SILENT_FOR)
    assert [*stack.term.routing.routes.levels.silent.values()] == ["old"]
    await stack.report("old", Event.IDLE, in_flight=0)
    await clock.advance(SILENT_FOR)
    assert stack.term.routing.routes.levels.silent == {}


async def test_worker_is_notified_once_and_again_after_a_while(stack, broker):
    """A confirmed message for each report, or for each group every few seconds, would be a load of its own."""
    await send(stack, "a", b"1")
    before = broker.count("publish", "pool-ctl-xchg")
    for event in (Event.STARTED, *[Event.BUSY, Event.IDLE] * 20):
        await stack.report("a", event)
        await stack.clock.advance(1.0)
    assert broker.count("publish", "pool-ctl-xchg") - before == 1
    await stack.clock.advance(SEND_AGAIN_AFTER)
    assert broker.count("publish", "pool-ctl-xchg") - before == 2
    await stack.report("a", Event.STARTED)  # a process that was started anew with the same name
    assert broker.count("publish", "pool-ctl-xchg") - before == 3


async def test_foreign_queue_with_the_name_of_a_priority_level_survives_the_end_of_the_group(stack):
    await change(stack, rest=REST)
    await send(stack, "a", b"1")
    delivery = await stack.take("a")
    await delivery.ack()
    await delivery.channel.close()
    stack.retire(A)
    while stack.status_of(A) is not None:
        await stack.clock.advance(1.0)
    stack.broker.declare_queue("pool-req-a_Pri0", {"x-queue-type": "classic"})
    await change(stack, alerts=ALERTS, rest=REST)
    await stack.clock.advance(300.0)
    assert ("pool-req-a" in stack.broker.queues, "pool-req-a_Pri0" in stack.broker.queues) == (False, True)


async def test_requests_of_a_later_level_of_a_failed_group_are_answered(clock, broker):
    driver = FakeDriver(clock, pool=POOL)
    driver.fail_next_start(StartFailedError("no such image"))
    async with leading(clock, broker=broker, driver=driver, settings=managed()) as stack:
        await stack.publish("a", reply_to=REPLIES, correlation_id="1")
        await clock.advance(1.0)
        await change(stack, alerts=ALERTS, rest=REST)
        await stack.publish("a", headers={"level": "alert"}, reply_to=REPLIES, correlation_id="2")
        await clock.advance(2.0)
        assert answers(broker) == [("1", "start-failed"), ("2", "start-failed")]


async def test_only_queues_of_the_failed_group_itself_are_answered(clock, broker):
    foreign = broker.declare_queue("pool-req-a_Pri0", {"x-queue-type": "classic"})
    async with managing(clock, broker, rest=REST) as stack:
        await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c")
        await change(stack, alerts=ALERTS, rest=REST)
    driver = FakeDriver(clock, pool=POOL)
    driver.fail_next_start(StartFailedError("no such image"))
    async with leading(clock, broker=broker, driver=driver, settings=managed()):
        await clock.advance(1.0)
        assert (answers(broker), foreign.holders) == ([("c", "start-failed")], [])


async def test_control_message_that_is_not_taken_ends_no_term(stack, broker):
    await send(stack, "a", b"1")
    refuse(broker, BrokerSilentError("No confirm in time."), ("publish", "pool-ctl-xchg", False))
    await stack.report("a", Event.READY, in_flight=0)
    await stack.clock.advance(20.0)
    assert not stack.task.done()


async def test_idle_group_goes_with_all_its_queues(stack, broker):
    await send_levels(stack, "alert")
    await stack.report("a", Event.READY)
    delivery = await FakeChannel(broker).get("pool-req-a_Pri0")
    assert delivery is not None
    await delivery.ack()
    await stack.clock.advance(3600.0)
    assert [name for name in broker.queues if name.startswith("pool-req-")] == []


def counted(stack: Stack, outcome: str, route: str = "", priority: str = "") -> float | None:
    labels = {"outcome": outcome, "route": route, "priority": priority}
    return stack.metrics.registry.get_sample_value("osrdyne_ingress_total", labels)


async def test_requests_are_counted_by_known_routes_only(clock, broker):
    broker.declare_queue("pool-req-a", {"x-queue-type": "classic"})
    async with managing(clock, broker, alerts=ALERTS) as stack:
        await send_levels(stack, "alert", "none")
        await clock.advance(1.0)
        assert (counted(stack, "start-failed", "alerts", "0"), counted(stack, "no-route")) == (1.0, 1.0)
        await publish_to(stack, "pool-work-xchg", "b", headers={ROUTE_HEADER: "made up"})
        assert counted(stack, "accepted", "other", "default") == 1.0


async def test_condition_beyond_its_work_limit_takes_no_request_and_is_counted(stack):
    costly = " OR ".join(f"contains(word, 'y{number}')" for number in range(400))
    await change(stack, costly=f"FROM /messages/* WHERE {costly} INTO $upstream", rest=REST)
    await send(stack, "a", headers={"word": "x" * 2**20})
    assert stack.metrics.registry.get_sample_value("osrdyne_conditions_limited_total") == 1.0
    assert counted(stack, "accepted", "rest", "default") == 1.0


async def test_backlog_of_priority_levels_is_known_after_each_listing(stack, clock):
    await send_levels(stack, "alert")
    first = clock.monotonic()
    await clock.advance(10.0)
    await send_levels(stack, "alert", "none", "none", key="b")
    second = clock.monotonic()
    await clock.advance(60.0)
    assert stack.backlog() == {0: Waiting(2, first), None: Waiting(2, second)}


async def test_change_tells_how_many_requests_of_unused_priorities_wait(stack):
    await change(stack, alerts=ALERTS, data=DATA, rest=REST)
    await send_levels(stack, "alert", "alert", "data", "none")
    await send_levels(stack, "alert", key="b")
    done = await change(stack, data=DATA, rest=REST)
    assert (done.removed, done.pending) == ((0,), {0: 3})

"""Writes to the log of telemetry: a real leader on a broker in memory, in virtual time."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from broker_steps import fail_in_turn
from managed_pool import change, managed, send, waiting
from replies import REPLIES, answers

from osrdyne.config.models import LifecycleSettings, TelemetrySettings
from osrdyne.errors import BrokerAccessError, BrokerSilentError, OsrdyneError, PublishRefusedError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.protocol.messages import DUPLICATE_HEADER, PRINCIPAL_HEADER, ROUTE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER, partition_of
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading

LOG = 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")'
HOT = "FROM /messages/* WHERE level = 'alert' INTO $upstream"
NOT_CONFIRMED = BrokerSilentError("no confirm in time")
RETURNED = PublishRefusedError("there is no queue for it")
NO_PERMISSION = BrokerAccessError("no permission")
LONG = 600.0


@asynccontextmanager
async def logging_to(
    clock: VirtualClock, broker: FakeBroker, *, partitions: int = 1, lifecycle: object = None, **routes: object
) -> AsyncIterator[Stack]:
    """A leader of a pool with the log `plant`."""
    updates: dict[str, object] = {"telemetry": TelemetrySettings(name="plant", partitions=partitions)}
    updates |= {} if lifecycle is None else {"lifecycle": lifecycle}
    async with leading(clock, broker=broker, settings=managed().model_copy(update=updates)) as stack:
        await change(stack, **(routes or {"log": LOG}))
        yield stack


@pytest.fixture
async def stack(clock, broker):
    async with logging_to(clock, broker) as stack:
        yield stack


def logged(broker: FakeBroker, partition: int = 0) -> list[bytes]:
    return broker.bodies(f"pool-log-{partition}")


def fail_writes(broker: FakeBroker, *faults: OsrdyneError | None) -> None:
    fail_in_turn(broker, ("publish", "pool-log-0", False), *faults)


@pytest.mark.proves("telemetry/client-sets-headers-log")
async def test_message_is_in_the_partition_of_its_key_with_headers(clock, broker):
    async with logging_to(clock, broker, partitions=4) as stack:
        at = round(clock.time() * 1000)
        headers = {KEY_HEADER: "other", PRINCIPAL_HEADER: "admin", "x-stream-offset": 7, "authorization": "Bearer x"}
        for number in range(8):
            properties = {"message_id": f"m{number}", "headers": {**headers, "site": "b"}}
            await stack.publish(f"plant/{number}", b"%d" % number, **properties)
        await clock.settle()
        for number in range(8):
            partition = partition_of(Key(f"plant/{number}"), 4)
            place = logged(broker, partition).index(b"%d" % number)
            message = broker.queues[f"pool-log-{partition}"].ready[place].message
            assert message.message_id == f"m{number}"
            assert dict(message.headers) == {
                KEY_HEADER: f"plant/{number}", ENQUEUED_HEADER: at, ROUTE_HEADER: "log", "site": "b",
            }  # fmt: skip
        assert (stack.orphans(), stack.driver.workers_of(Key("plant/0"))) == ([], [])


async def test_caller_is_answered_accepted_with_the_partition(stack, broker):
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c1", expiration="60000")
    assert answers(broker) == [("c1", "ok")]
    [reply] = broker.queues[REPLIES].ready
    accepted = json.loads(reply.message.body)["accepted"]
    found = reply.message.headers["x-code"], accepted["code"], accepted["log"], accepted["partition"]
    assert found == (202, "ok", "plant", 0)
    [stored] = broker.queues["pool-log-0"].ready
    assert (stored.message.reply_to, stored.message.expiration) == (None, None)


@pytest.mark.parametrize(
    ("step", "copies"),
    [
        (("publish", "pool-log-0", False), [("m1", True)]),
        (("publish", "pool-log-0", True), [("m1", None), ("m1", True)]),
        (("ack", "pool-orphan", False), [("m1", None), ("m1", True)]),
        (("ack", "pool-orphan", True), [("m1", None)]),
    ],
    ids=["before the publish", "after the publish", "before the acknowledgement", "after the acknowledgement"],
)
@pytest.mark.proves("telemetry/leader-dies-confirm-acknowledgement", "telemetry/leader-dies-log-confirmed")
async def test_leader_killed_around_each_step_loses_no_message(stack, clock, broker, step, copies):
    """A second copy has the same message id, and is marked."""

    async def kill(command):
        if command == step and not stack.killed:
            await stack.kill()

    broker.hook = kill
    await send(stack, "a", b"1", message_id="m1")
    assert stack.killed
    broker.hook = None
    async with logging_to(clock, broker) as following:
        await clock.settle()
        written = [stored.message for stored in broker.queues["pool-log-0"].ready]
        assert [(message.message_id, message.headers.get(DUPLICATE_HEADER)) for message in written] == copies
        assert following.orphans() == []


@pytest.mark.proves("telemetry/stream-confirm-example-leader")
@pytest.mark.parametrize(("fault", "marked"), [(NOT_CONFIRMED, True), (NO_PERMISSION, True), (RETURNED, None)], ids=str)
async def test_request_is_acknowledged_only_after_the_log_has_confirmed_it_and_is_not_overtaken(
    stack, broker, fault, marked
):
    fail_writes(broker, fault, fault)
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c1")
    for body in (b"2", b"3"):
        await stack.publish("a", body)
    await stack.clock.settle()
    assert (logged(broker), stack.orphans(), answers(broker)) == ([], [b"1", b"2", b"3"], [])
    await stack.clock.advance(LONG)
    assert (logged(broker), stack.orphans(), answers(broker)) == ([b"1", b"2", b"3"], [], [("c1", "ok")])
    marks = [stored.message.headers.get(DUPLICATE_HEADER) for stored in broker.queues["pool-log-0"].ready]
    assert marks == [marked, None, None]


@pytest.mark.proves("telemetry/stream-log-deleted")
async def test_deleted_stream_is_declared_again_and_gets_what_waited(clock, broker):
    lifecycle = LifecycleSettings(topology_interval=10.0)
    async with logging_to(clock, broker, lifecycle=lifecycle) as stack:
        broker.delete_queue("pool-log-0")
        await send(stack, "a", b"1")
        assert (stack.orphans(), "pool-log-0" in broker.queues) == ([b"1"], False)
        await clock.advance(60.0)
        assert (logged(broker), stack.orphans()) == ([b"1"], [])


@pytest.mark.proves("telemetry/log-cannot-written-until")
@pytest.mark.parametrize("fault", [NOT_CONFIRMED, RETURNED], ids=["not confirmed", "returned"])
async def test_messages_that_wait_for_another_are_answered_at_their_deadlines(stack, fault):
    fail_writes(stack.broker, *[fault] * 8)
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c1")
    await stack.publish("a", b"2", reply_to=REPLIES, correlation_id="c2", expiration="3000")
    await stack.publish("a", b"3", reply_to=REPLIES, correlation_id="c3")
    await stack.clock.advance(10.0)
    assert (answers(stack.broker), stack.orphans()) == ([("c2", "expired")], [b"1", b"3"])
    await stack.clock.advance(LONG)
    assert (logged(stack.broker), stack.orphans()) == ([b"1", b"3"], [])
    fail_writes(stack.broker, *[fault] * 100)
    await stack.publish("a", b"4", reply_to=REPLIES, correlation_id="c4", expiration="20000")
    await stack.clock.advance(30.0)
    assert (answers(stack.broker)[-1], stack.orphans()) == (("c4", "expired"), [])


@pytest.mark.proves("telemetry/stream-confirm-example-leader")
async def test_log_that_does_not_confirm_holds_up_no_group_and_no_other_key(stack, broker):
    """More messages than the prefetch wait for the log."""
    await change(stack, hot=HOT, log="FROM /messages/* WHERE level = 'data' INTO " + LOG.split("INTO ")[1])
    fail_writes(broker, *[RETURNED] * 10_000)
    for number in range(600):
        await stack.publish("a", b"%d" % number, headers={"level": "data"})
    await stack.clock.advance(1.0)
    await stack.publish("a", b"alert", headers={"level": "alert"})
    await stack.clock.advance(10.0)
    assert waiting(stack, None) == [b"alert"]
    assert len(stack.orphans()) == 600


@pytest.mark.parametrize(
    ("routes", "answered", "reply_to"),
    [({"log": LOG, "hot": HOT}, [("c1", "ok")], None), ({"hot": HOT, "log": LOG}, [], REPLIES)],
    ids=["log", "group"],
)
async def test_request_with_two_sinks_is_answered_by_the_first_and_is_in_both(
    stack, broker, routes, answered, reply_to
):
    await change(stack, **routes)
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c1", headers={"level": "alert"})
    [stored] = broker.queues["pool-req-a"].ready
    assert (answers(broker), stored.message.reply_to, stack.orphans()) == (answered, reply_to, [])
    assert logged(broker) == waiting(stack, None) == [b"1"]


@pytest.mark.proves("telemetry/request-group-log-group")
async def test_message_is_in_the_log_although_its_group_has_no_room(clock, broker):
    lifecycle = LifecycleSettings(max_groups=1, max_waiting_groups=0, topology_interval=3600.0)
    async with logging_to(clock, broker, lifecycle=lifecycle, hot=HOT, log=LOG) as stack:
        for key in ("a", "b"):
            headers = {"level": "alert"}
            await send(stack, key, key.encode(), reply_to=REPLIES, correlation_id=key, headers=headers)
        assert answers(broker) == [("b", "capacity")]
        assert (logged(broker), stack.orphans()) == ([b"a", b"b"], [])


@pytest.mark.proves("telemetry/route-names-log-pool")
async def test_route_to_a_log_that_the_pool_does_not_have_is_refused_and_a_kept_one_its_requests(stack):
    with pytest.raises(InvalidDocumentError, match="plant"):
        await change(stack, log=LOG.replace("plant", "other"))
    await stack.kill()
    renamed = managed().model_copy(update={"telemetry": TelemetrySettings(name="renamed", partitions=1)})
    async with leading(stack.clock, broker=stack.broker, settings=renamed) as following:
        await send(following, "a", b"1", reply_to=REPLIES, correlation_id="c1")
        assert (answers(stack.broker), following.orphans()) == ([("c1", "rejected")], [])
        assert logged(stack.broker) == []

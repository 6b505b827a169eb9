"""Writes to the log of telemetry: a real leader on a broker in memory, in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from broker_steps import Step, fail_in_turn
from managed_pool import change, managed, send, waiting
from replies import REPLIES, answers

from osrdyne.config.models import LifecycleSettings, TelemetrySettings
from osrdyne.errors import BrokerSilentError, OsrdyneError, PublishRefusedError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.protocol.messages import DUPLICATE_HEADER, PRINCIPAL_HEADER, ROUTE_HEADER
from osrdyne.protocol.names import Key
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER, partition_of
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import Stack, leading

LOG = 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")'
HOT = "FROM /messages/* WHERE level = 'alert' INTO $upstream"
NOT_CONFIRMED = BrokerSilentError("no confirm in time")
RETURNED = PublishRefusedError("there is no queue for it")
LONG = 600.0


@asynccontextmanager
async def logging_to(
    clock: VirtualClock,
    broker: FakeBroker,
    *,
    partitions: int = 1,
    lifecycle: LifecycleSettings | None = None,
    **routes: object,
) -> AsyncIterator[Stack]:
    """A leader of a pool with the log `plant`."""
    updates: dict[str, object] = {"telemetry": TelemetrySettings(name="plant", partitions=partitions)}
    if lifecycle is not None:
        updates["lifecycle"] = lifecycle
    async with leading(clock, broker=broker, settings=managed().model_copy(update=updates)) as stack:
        await change(stack, **(routes or {"log": LOG}))
        yield stack


@pytest.fixture
async def stack(clock: VirtualClock, broker: FakeBroker) -> AsyncIterator[Stack]:
    async with logging_to(clock, broker) as stack:
        yield stack


def logged(broker: FakeBroker, partition: int = 0) -> list[bytes]:
    return broker.bodies(f"pool-log-{partition}")


def headers_of(broker: FakeBroker, place: int = 0, partition: int = 0) -> dict[str, object]:
    return dict(broker.queues[f"pool-log-{partition}"].ready[place].message.headers)


def fail_writes(broker: FakeBroker, *faults: OsrdyneError | None, arrives: bool = False) -> None:
    """Make the next publishes to the log fail, before or after they arrive (`arrives`)."""
    fail_in_turn(broker, ("publish", "pool-log-0", arrives), *faults)


@pytest.mark.proves("telemetry/client-sets-headers-log")
async def test_message_is_in_the_partition_of_its_key_with_what_readers_need(
    clock: VirtualClock, broker: FakeBroker
) -> None:
    async with logging_to(clock, broker, partitions=4) as stack:
        at = round(clock.time() * 1000)
        forged = {
            KEY_HEADER: "other",
            PRINCIPAL_HEADER: "admin",
            "x-stream-offset": 7,
            "site": "b",
            "authorization": "Bearer secret",
        }
        for number in range(8):
            await stack.publish(f"plant/{number}", b"%d" % number, message_id=f"m{number}", headers=forged)
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


async def test_caller_is_answered_accepted_with_the_partition(stack: Stack, broker: FakeBroker) -> None:
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
async def test_leader_killed_around_each_step_loses_no_message(
    stack: Stack, clock: VirtualClock, broker: FakeBroker, step: Step, copies: list[tuple[str, bool | None]]
) -> None:
    """A second copy has the same message id, and is marked."""

    async def kill(command: Command) -> None:
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
async def test_request_is_acknowledged_only_after_the_log_has_confirmed_it(stack: Stack, broker: FakeBroker) -> None:
    fail_writes(broker, NOT_CONFIRMED, arrives=True)
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c1")
    assert (logged(broker), stack.orphans(), answers(broker)) == ([b"1"], [b"1"], [])
    await stack.clock.advance(LONG)
    assert (logged(broker), stack.orphans(), answers(broker)) == ([b"1", b"1"], [], [("c1", "ok")])
    assert [headers_of(broker, place).get(DUPLICATE_HEADER) for place in (0, 1)] == [None, True]


@pytest.mark.proves("telemetry/stream-confirm-example-leader")
@pytest.mark.parametrize("fault", [NOT_CONFIRMED, RETURNED], ids=["not confirmed", "returned"])
async def test_message_that_is_written_again_is_not_overtaken(stack: Stack, fault: OsrdyneError) -> None:
    fail_writes(stack.broker, fault, fault)
    await send(stack, "a", b"1")
    for body in (b"2", b"3"):
        await stack.publish("a", body)
    await stack.clock.advance(LONG)
    assert (logged(stack.broker), stack.orphans()) == ([b"1", b"2", b"3"], [])


@pytest.mark.proves("telemetry/stream-log-deleted")
async def test_deleted_stream_is_declared_again_and_gets_what_waited(clock: VirtualClock, broker: FakeBroker) -> None:
    lifecycle = LifecycleSettings(topology_interval=10.0)
    async with logging_to(clock, broker, lifecycle=lifecycle) as stack:
        broker.delete_queue("pool-log-0")
        await send(stack, "a", b"1")
        assert (stack.orphans(), "pool-log-0" in broker.queues) == ([b"1"], False)
        await clock.advance(60.0)
        assert (logged(broker), stack.orphans()) == ([b"1"], [])


@pytest.mark.proves("telemetry/log-cannot-written-until")
@pytest.mark.parametrize("fault", [NOT_CONFIRMED, RETURNED], ids=["not confirmed", "returned"])
async def test_write_ends_at_the_callers_deadline_and_the_caller_is_answered(stack: Stack, fault: OsrdyneError) -> None:
    fail_writes(stack.broker, *[fault] * 100)
    await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c1", expiration="20000")
    await stack.clock.advance(30.0)
    assert (answers(stack.broker), stack.orphans(), logged(stack.broker)) == ([("c1", "expired")], [], [])


@pytest.mark.proves("telemetry/log-cannot-written-until")
@pytest.mark.parametrize("fault", [NOT_CONFIRMED, RETURNED], ids=["not confirmed", "returned"])
async def test_message_that_waits_for_another_is_answered_at_its_own_deadline(
    stack: Stack, fault: OsrdyneError
) -> None:
    fail_writes(stack.broker, *[fault] * 8)
    await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c1")
    await stack.publish("a", b"2", reply_to=REPLIES, correlation_id="c2", expiration="3000")
    await stack.publish("a", b"3", reply_to=REPLIES, correlation_id="c3")
    await stack.clock.advance(10.0)
    assert (answers(stack.broker), stack.orphans()) == ([("c2", "expired")], [b"1", b"3"])
    await stack.clock.advance(LONG)
    assert (logged(stack.broker), stack.orphans()) == ([b"1", b"3"], [])


@pytest.mark.proves("telemetry/stream-confirm-example-leader")
async def test_log_that_does_not_confirm_holds_up_no_group_and_no_other_key(stack: Stack, broker: FakeBroker) -> None:
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


async def test_request_with_two_sinks_is_answered_by_the_first_and_is_in_both(
    clock: VirtualClock, broker: FakeBroker
) -> None:
    for routes in ({"log": LOG, "hot": HOT}, {"hot": HOT, "log": LOG}):
        async with logging_to(clock, broker, **routes) as stack:
            before = len(answers(broker))
            await send(stack, "a", b"1", reply_to=REPLIES, correlation_id="c1", headers={"level": "alert"})
            replies = [stored.message.reply_to for stored in broker.queues["pool-req-a"].ready]
            if next(iter(routes)) == "log":
                assert (len(answers(broker)) - before, replies[-1]) == (1, None)
            else:
                assert (len(answers(broker)) - before, replies[-1]) == (0, REPLIES)
            assert stack.orphans() == []
    assert logged(broker) == waiting(stack, None) == [b"1", b"1"]


@pytest.mark.proves("telemetry/request-group-log-group")
async def test_message_is_in_the_log_although_its_group_has_no_room(clock: VirtualClock, broker: FakeBroker) -> None:
    lifecycle = LifecycleSettings(max_groups=1, max_waiting_groups=0, topology_interval=3600.0)
    async with logging_to(clock, broker, lifecycle=lifecycle, hot=HOT, log=LOG) as stack:
        for key, correlation_id in (("a", "c1"), ("b", "c2")):
            await send(
                stack, key, key.encode(), reply_to=REPLIES, correlation_id=correlation_id, headers={"level": "alert"}
            )
        assert answers(broker) == [("c2", "capacity")]
        assert (logged(broker), stack.orphans()) == ([b"a", b"b"], [])


@pytest.mark.proves("telemetry/request-group-log-group")
async def test_message_is_in_the_log_although_it_may_start_no_group(stack: Stack, broker: FakeBroker) -> None:
    modest: dict[str, object] = {"x-no-activate": True}
    await change(stack, hot=HOT, log=LOG)
    for number, level in enumerate(("alert", "normal")):
        name = f"c{number}"
        await send(
            stack, "a", level.encode(), reply_to=REPLIES, correlation_id=name, headers={**modest, "level": level}
        )
    assert answers(broker) == [("c0", "not-running"), ("c1", "ok")]
    assert (logged(broker), stack.orphans(), stack.running("a")) == ([b"alert", b"normal"], [], 0)
    await stack.publish("a", b"starts", headers={"level": "alert"})
    await send(stack, "a", b"up", headers={**modest, "level": "alert"})
    assert (logged(broker)[2:], waiting(stack, None)) == ([b"starts", b"up"], [b"starts", b"up"])


@pytest.mark.proves("telemetry/stream-confirm-example-leader")
async def test_refused_message_that_the_log_does_not_confirm_holds_up_no_request_of_its_key(stack: Stack) -> None:
    await change(stack, hot=HOT, log=LOG)
    fail_writes(stack.broker, *[RETURNED] * 100)
    modest = {"x-no-activate": True, "level": "alert"}
    await stack.publish("a", b"1", reply_to=REPLIES, correlation_id="c1", headers=modest)
    await stack.publish("a", b"2", headers={"level": "alert"})
    await stack.clock.advance(10.0)
    assert (answers(stack.broker), waiting(stack, None)) == ([("c1", "not-running")], [b"2"])
    assert (logged(stack.broker), stack.orphans()) == ([], [b"1", b"2"])


@pytest.mark.proves("telemetry/route-names-log-pool")
async def test_route_to_a_log_that_the_pool_does_not_have_is_refused(stack: Stack) -> None:
    with pytest.raises(InvalidDocumentError, match="plant"):
        await change(stack, log=LOG.replace("plant", "other"))


@pytest.mark.proves("telemetry/route-names-log-pool")
async def test_kept_route_to_a_log_that_is_gone_refuses_its_requests(stack: Stack, broker: FakeBroker) -> None:
    await stack.kill()
    renamed = managed().model_copy(update={"telemetry": TelemetrySettings(name="renamed", partitions=1)})
    async with leading(stack.clock, broker=broker, settings=renamed) as following:
        await send(following, "a", b"1", reply_to=REPLIES, correlation_id="c1")
        assert (answers(broker), following.orphans(), logged(broker)) == ([("c1", "rejected")], [], [])

"""Records of changes in the queue of a leader, on a broker in memory: what a crash and a refusing RabbitMQ leave."""

import asyncio
from dataclasses import replace

import pytest
import structlog
from broker_steps import hold

from osrdyne.amqp import Message
from osrdyne.auth.audit import AuditPage, AuditQuery, AuditRecord, Outcome
from osrdyne.config.models import AuditSettings
from osrdyne.processors import audit
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.stack import Stack, leading, settings_for


@pytest.fixture
def stack(direct):
    return direct


def change(clock: VirtualClock, number: int = 0) -> AuditRecord:
    return AuditRecord(
        request_id=f"{number:032x}",
        at_ms=int(clock.time() * 1000) + number,
        principal="alice",
        method="token",
        action="groups.stop",
    )


def ended(record: AuditRecord) -> AuditRecord:
    return replace(record, outcome=Outcome.DONE, status=202)


async def settled(stack: Stack, task: asyncio.Task[object]) -> None:
    while not task.done():
        await stack.clock.advance(0.1)


async def write(stack: Stack, *records: AuditRecord) -> list[bool]:
    found = []
    for record in records:
        task = asyncio.create_task(stack.term.processors.audit.write(record))
        await settled(stack, task)
        found.append(task.result())
    return found


async def read(stack: Stack, **query: object) -> AuditPage:
    task = asyncio.create_task(stack.term.processors.audit.page(AuditQuery(**query)))  # type: ignore[arg-type]
    while not task.done():
        await stack.clock.advance(0.1)
        await asyncio.sleep(0.001)  # the page is made in a thread
    return task.result()


def lost(stack: Stack) -> float | None:
    return stack.metrics.registry.get_sample_value("osrdyne_audit_records_total", {"result": "lost"})


async def test_records_are_read_once_in_a_term_without_taking_them_out(clock, broker):
    """Also where the queue holds a record twice."""
    one, two = change(clock, 1), change(clock, 2)
    async with leading(clock, broker=broker) as stack:
        assert await write(stack, one, one, ended(one), two) == [True] * 4
        for _ in range(3):
            assert (await read(stack)).records == (two, ended(one))
        await stack.kill()
    async with leading(clock, broker=broker) as stack:
        before = broker.count("consume", stack.names.audit_queue)
        assert (await read(stack)).records == (two, ended(one))
        await write(stack, ended(two))
        assert (await read(stack)).records == (ended(two), ended(one))
        assert broker.count("consume", stack.names.audit_queue) == before + 1
        assert len(broker.bodies(stack.names.audit_queue)) == 5


@pytest.mark.proves("api/daemon-ends-between-change", "api/daemon-killed-middle-change")
async def test_leader_killed_between_record_and_outcome_leaves_a_change_with_unknown_outcome(stack):
    await write(stack, change(stack.clock))
    await stack.kill()
    async with leading(stack.clock, broker=stack.broker) as following:
        [left] = (await read(following)).records
        assert (left.outcome, left.status) == (Outcome.UNKNOWN, None)


@pytest.mark.proves("api/daemon-ends-stores-record")
@pytest.mark.parametrize("done", [False, True], ids=["before RabbitMQ has it", "before the confirm"])
async def test_leader_killed_while_it_stores_a_record_does_not_claim_that_it_is_stored(stack, clock, broker, done):
    hold(broker, ("publish", stack.names.audit_exchange, done))
    task = asyncio.create_task(stack.term.processors.audit.write(change(clock)))
    await clock.settle()
    await stack.kill()
    await settled(stack, task)
    assert (task.result(), lost(stack)) == (False, 1)
    broker.hook = None
    async with leading(clock, broker=broker) as following:
        assert (await read(following)).total == int(done)


@pytest.mark.proves("api/rabbitmq-refuses-record-change")
async def test_record_that_rabbitmq_refuses_is_counted_and_is_in_the_log(stack, broker):
    broker.unbind(stack.names.audit_queue, stack.names.audit_exchange, "")
    with structlog.testing.capture_logs() as logs:
        assert await write(stack, change(stack.clock)) == [False]
    [line] = [one for one in logs if one["event"] == "audit record not stored"]
    assert (line["principal"], line["action"], line["request_id"]) == ("alice", "groups.stop", "0" * 32)
    assert lost(stack) == 1
    broker.bind(stack.names.audit_queue, stack.names.audit_exchange, "")
    assert await write(stack, change(stack.clock, 1)) == [True]


@pytest.mark.proves("api/rabbitmq-confirms-record-alarm")
async def test_silent_audit_queue_delays_changes_for_a_bounded_time_and_keeps_a_bounded_number_of_records(
    clock, broker, monkeypatch
):
    monkeypatch.setattr(audit, "CONFIRM_TIMEOUT", 0.01)
    monkeypatch.setattr(audit, "MAX_PENDING", 2)
    async with leading(clock, broker=broker) as stack:
        resume = hold(broker, ("publish", stack.names.audit_exchange, False))
        found = [await stack.term.processors.audit.write(change(clock, number)) for number in range(5)]
        # One is being published, two wait, the others are lost at once.
        assert (found, lost(stack)) == ([False] * 5, 2)
        broker.hook = None
        resume.set()
        await clock.advance(1)
        # Those that waited are stored late, in their order.
        assert [record.request_id for record in (await read(stack)).records] == [f"{n:032x}" for n in (2, 1, 0)]


@pytest.mark.proves("api/client-forges-record-queue")
async def test_forged_and_damaged_records_are_dropped(stack, clock, broker):
    forged = change(clock, 7).to_text().encode()
    await write(stack, change(clock, 1))
    channel = FakeChannel(broker)
    await channel.publish(Message(forged), exchange="", routing_key=stack.names.audit_queue)
    await channel.publish(Message(b"[" * 50_000), exchange=stack.names.audit_exchange, routing_key="")
    assert [record.request_id for record in (await read(stack)).records] == [f"{1:032x}"]
    await clock.settle()
    assert len(broker.bodies(stack.names.audit_queue)) == 1


async def test_record_that_is_too_old_is_not_shown(clock, broker):
    settings = settings_for().model_copy(update={"audit": AuditSettings(max_age=3600.0)})
    async with leading(clock, broker=broker, settings=settings) as stack:
        await write(stack, change(clock))
        assert (await read(stack)).total == 1
        await clock.advance(3_590)
        assert (await read(stack)).total == 1
        await clock.advance(20)
        assert (await read(stack)).total == 0


async def test_memory_holds_no_more_records_than_the_queue(clock, broker):
    settings = settings_for().model_copy(update={"audit": AuditSettings(max_changes=100)})
    async with leading(clock, broker=broker, settings=settings) as stack:
        trail = stack.term.processors.audit
        writes = [asyncio.create_task(trail.write(change(clock, number))) for number in range(250)]
        for task in writes:
            await settled(stack, task)
        page = await read(stack, limit=1)
        assert (page.total, page.records[0].request_id) == (200, f"{249:032x}")

"""broker: reattached-consumers: RabbitMQ before 4.0 delivers nothing to a consumer whose queue was declared again."""

import asyncio

import pytest

from osrdyne.amqp import Message
from osrdyne.broker.queues.request_queues import REATTACH_TIME
from osrdyne.errors import BrokerUnavailableError
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command as ControlCommand
from osrdyne.protocol.control import control_from_wire
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.testing.fakes.amqp import FakeChannel, FakeConnection
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, make_stack

NAMES = PoolNames(POOL)
NOTICED = 10.0
QUEUES = (NAMES.orphan_queue, NAMES.dead_letter_queue, NAMES.activity_queue, NAMES.cancel_queue, NAMES.progress_queue)


@pytest.fixture
def version():
    return "3.10.8"


@pytest.fixture
async def stack(clock, broker, monkeypatch, version):
    """A leader whose term a test may end."""
    monkeypatch.setattr(FakeConnection, "server_version", version)
    stack = make_stack(clock, broker=broker)
    stack.task = asyncio.create_task(stack.lead())
    await clock.advance(5.0)
    yield stack
    stack.task.cancel()
    await asyncio.wait({stack.task})


def declare_again(stack: Stack, queue: str) -> None:
    """Delete the queue and declare it again at once: RabbitMQ drops what it delivers to the consumers."""
    for connection in stack.connections:
        for channel in connection.channels:
            for consumed, _, consumer in channel._holders.values():
                if consumed.name == queue:
                    consumer.put = lambda _: None  # type: ignore[method-assign]


def watch_control(broker: FakeBroker, *workers: str, queue: str = "seen") -> None:
    """Keep what is sent to the group of the key `a`, or to these workers."""
    broker.declare_queue(queue, {})
    addresses = [NAMES.control_worker_routing_key(WorkerId(worker)) for worker in workers]
    for address in addresses or [NAMES.control_group_routing_key(Key("a"))]:
        broker.bind(queue, NAMES.control_exchange, address)


def reconnects(broker: FakeBroker, queue: str = "seen") -> int:
    """How often these workers were asked to connect anew."""
    messages = [control_from_wire(body) for body in broker.bodies(queue)]
    return [one.command for one in messages if one].count(ControlCommand.RECONNECT)


async def publish(broker: FakeBroker, queue: str) -> None:
    message = Message(body=b"{}", headers={"x-osrdyne-key": "a"})
    await FakeChannel(broker).publish(message, exchange="", routing_key=queue)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.proves("broker/controller-queue-declared-again")
async def test_consumer_that_gets_nothing_ends_the_term(stack, clock, broker, queue):
    await clock.advance(60.0)
    assert not stack.task.done()
    declare_again(stack, queue)
    await publish(broker, queue)
    await clock.advance(NOTICED)
    assert stack.task.done()
    with pytest.raises(ExceptionGroup) as raised:
        await stack.task
    assert raised.group_contains(BrokerUnavailableError, match=queue)
    async with leading(clock, broker=broker):
        await clock.advance(5.0)
        assert broker.look_up(queue).messages == 0


@pytest.mark.parametrize(("version", "asks"), [("3.10.8", True), ("4.0.0", False)])
async def test_messages_that_wait_for_a_busy_consumer_end_no_term_and_a_newer_rabbitmq_is_not_asked(
    stack, clock, broker, asks
):
    async def hold_bind(command):
        if command.name == "bind" and not command.done:
            await asyncio.Event().wait()

    broker.hook = hold_bind
    for number in range(600):
        await stack.publish(f"k{number}")
    before = broker.count("publish", NAMES.cancel_queue)
    await clock.advance(60.0)
    assert not stack.task.done()
    assert (broker.count("publish", NAMES.cancel_queue) > before) is asks


@pytest.mark.parametrize(("version", "waits"), [("3.10.8", True), ("4.0.0", False)])
@pytest.mark.proves("broker/request-queue-declared-again")
async def test_deleted_request_queue_is_declared_after_its_consumers_are_cancelled(stack, clock, broker, waits):
    queue, declared_at = NAMES.request_queue(Key("a")), list[float]()

    async def note(command):
        if command.name == "declare" and command.target == queue and not command.done:
            declared_at.append(clock.monotonic())

    await stack.publish("a")
    await clock.advance(1.0)
    broker.hook = note
    broker.delete_queue(queue)
    deleted_at = clock.monotonic()
    await stack.publish("a", b"again")
    await clock.advance(5.0)
    assert (declared_at[0] - deleted_at >= REATTACH_TIME) is waits
    assert stack.waiting("a") == [b"again"]


@pytest.mark.parametrize(("version", "asked"), [("3.10.8", 1), ("4.0.0", 0)])
@pytest.mark.proves("broker/request-queue-declared-again")
async def test_workers_of_a_queue_that_lost_its_binding_connect_again(stack, clock, broker, asked):
    """Another program may have declared the queue again, with consumers that get nothing."""
    await stack.publish("a")
    await clock.advance(1.0)
    watch_control(broker)
    key = Key("a")
    broker.unbind(NAMES.request_queue(key), NAMES.requests_exchange, key)
    await stack.publish("a", b"again")
    await clock.advance(1.0)
    assert reconnects(broker) == asked
    assert stack.waiting("a") == [b"", b"again"]


@pytest.mark.parametrize(
    ("version", "works", "asked"),
    [("3.10.8", False, 1), ("3.10.8", True, 0), ("4.0.0", False, 0)],
    ids=["no worker has it", "a worker reports it", "later version"],
)
@pytest.mark.proves("broker/request-queue-declared-again")
async def test_workers_that_do_not_get_what_rabbitmq_delivers_connect_again(stack, clock, broker, works, asked):
    """Asked within ten seconds, and once: a client that is no worker may hold the request."""
    await stack.publish("a", b"1")
    await clock.advance(1.0)
    watch_control(broker, *(str(worker.instance.worker_id) for worker in stack.driver.workers_of(Key("a"))))
    await (await stack.take("a")).ack()
    await stack.report("a", Event.READY, in_flight=0)
    await clock.advance(60.0)
    await stack.publish("a", b"2")  # delivered to the same consumer
    if works:
        await stack.report("a", Event.REQUEST_RECEIVED, in_flight=1)
    for seconds in (NOTICED, 60.0):
        await clock.advance(seconds)
        assert reconnects(broker) == asked


@pytest.mark.parametrize(("lost", "asked"), [(1, 1), (0, 0)], ids=["another has it", "no request is lost"])
@pytest.mark.proves("broker/request-queue-declared-again")
async def test_worker_that_gets_nothing_connects_again_while_another_of_its_group_works(
    stack, clock, broker, lost, asked
):
    for _ in range(1 + lost):
        await stack.publish("a")
    await clock.advance(1.0)
    for _ in range(lost):
        await stack.take("a")
    for worker in ("works", "rests"):
        await stack.report("a", Event.READY, worker, in_flight=0)
        watch_control(broker, worker, queue=worker)
    worker = await stack.consume("a")
    for _ in range(30):
        request = await worker.get()
        await stack.publish("a")
        await stack.report("a", Event.REQUEST_RECEIVED, "works", in_flight=1)
        await clock.advance(2.0)
        await request.ack()
        await stack.report("a", Event.REQUEST_COMPLETED, "works", in_flight=0)
    assert (reconnects(broker, "rests"), reconnects(broker, "works")) == (asked, 0)

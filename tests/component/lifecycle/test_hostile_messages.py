"""Hostile messages by the thousand, on every queue of the controller and of a worker: nothing stops, each is counted.

They go through the real session, term, loops and processors, and through the real processor and dispatcher of the
worker, on a broker in memory. `tests/integration/test_hostile_wire.py` sends some to a real RabbitMQ.
"""

import asyncio
import io
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from osrdyne.amqp import ConnectionOptions, Message
from osrdyne.config.models import LifecycleSettings
from osrdyne.pool.views import PoisonQuery
from osrdyne.processors.failures.dead_letters import last_death
from osrdyne.protocol.control import ControlMessage
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, PoolNames, QueueName, ReplyAddresses, WorkerId
from osrdyne.protocol.statuses import Status
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.stack import POOL, Stack, leading, settings_for
from osrdyne.testing.hostile import HostileMessage, hostile_message
from osrdyne_worker import App, Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.requests.processor import Answering, Processor
from osrdyne_worker.requests.replies import ReplySender
from osrdyne_worker.requests.retries import Retries
from osrdyne_worker.runtime.connection import BrokerConnection
from osrdyne_worker.runtime.control import ControlWarnings, DesiredState, apply_control, listen
from osrdyne_worker.runtime.reports import Reporter
from osrdyne_worker.runtime.settings import RuntimeContext, RuntimeSettings

AT_ONCE = 100
EXAMPLES = int(os.environ.get("OSRDYNE_HOSTILE", "6000")) // (2 * AT_ONCE)
"""`OSRDYNE_HOSTILE` is the number of all messages (`make histories`)."""
NUMBERS = st.lists(st.integers(0, 2**32 - 1), min_size=AT_ONCE, max_size=AT_ONCE)
SETTINGS = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
KEYS = (b"a", b"b", "漢".encode())
PLACES = (
    ("pool-req-xchg", None),
    ("pool-req-xchg", None),
    ("pool-orphan-xchg", None),
    ("pool-dl-xchg", None),
    ("pool-activity-xchg", None),
    ("pool-cancel-xchg", None),
    ("pool-progress-xchg", None),
    ("", "pool-leader"),
    ("", "pool-poison"),
)
"""Exchanges, and where it is the default one the queue: every way into a queue of the controller."""
INVALID = {
    "activity": "activity report ignored",
    "cancel": "cancel ignored",
    "progress": "inquiry ignored",
    "dead-letters": "message has no x-death header",
}
"""What is logged about a message that makes no sense, by queue."""
CONSUMED = ("pool-orphan", "pool-dl", "pool-activity", "pool-cancel", "pool-progress")


@pytest.fixture
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def log():
    """Every event, after it has been written out as JSON and for a terminal."""
    before, events = structlog.get_config(), []

    def keep(_, level, event):
        events.append({"level": level, **event})
        structlog.dev.ConsoleRenderer(colors=False)(None, level, dict(event))
        return str(structlog.processors.JSONRenderer()(None, level, event)).encode().decode()

    structlog.configure(
        processors=[keep],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(io.StringIO()),
    )
    yield events
    structlog.configure(**before)


# --- the controller


def is_poison(place: str, message: Message) -> bool:
    """Whether a random message equals a dead letter of RabbitMQ at its delivery limit: it belongs in the inventory."""
    death = last_death(message.headers, PoolNames("pool"))
    return place == "pool-dl-xchg" and death is not None and death.reason is Status.DELIVERY_LIMIT


async def put(stack: Stack, messages: Sequence[HostileMessage]) -> Counter[str]:
    """Publish each at its place; how many went where, and how many of them are `poison`."""
    went: Counter[str] = Counter()
    for message in messages:
        exchange, queue = PLACES[message.number % len(PLACES)]
        routing_key, decoded = message.decoded()
        await stack.broker.publish(decoded, exchange=exchange, routing_key=queue or routing_key)
        went[queue or exchange] += 1
        went["poison"] += is_poison(exchange, decoded)
    return went


def counted(stack: Stack, name: str, **labels: str) -> int:
    """The total of a counter, over the labels that are not given."""
    return sum(
        int(sample.value)
        for metric in stack.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == f"{name}_total" and labels.items() <= sample.labels.items()
    )


async def suffer(messages: Sequence[HostileMessage], log: list[dict[str, Any]]) -> dict[str, object]:
    """What is wrong with a leader after these messages."""
    log.clear()
    clock = VirtualClock()
    async with leading(clock, settings=settings_for(LifecycleSettings(unbind_delay=3600.0))) as stack:
        went = await put(stack, messages)
        await clock.advance(10.0)
        await stack.publish("good", b"good")
        await clock.settle()
        poison = await stack.term.processors.poison.page(PoisonQuery(limit=1000, bodies=True))
        wrong = {
            "good request not served": stack.waiting("good") != [b"good"],
            "left": {name: len(stack.broker.bodies(name)) for name in CONSUMED if stack.broker.bodies(name)},
            "poison not dropped": went["pool-poison"] - counted(stack, "osrdyne_forged_messages", queue="poison"),
            "poison shown": poison.entries[went["poison"] :],
            **unaccounted(stack, went),
            **not_logged_once(stack, log),
        }
        await clock.advance(600.0)  # the token is renewed
        wrong["lost the lead"] = stack.task.done()
        wrong["more than the token"] = len(stack.broker.bodies("pool-leader")) - 1
        wrong["tracebacks"] = [event for event in log if event.get("exc_info")]
        await stack.kill()
    return {what: evidence for what, evidence in wrong.items() if evidence}


def unaccounted(stack: Stack, went: Counter[str]) -> dict[str, int]:
    """How many messages were neither forwarded nor answered nor counted."""
    waiting = sum(queue.messages for name, queue in stack.broker.queues.items() if name.startswith("pool-req-"))
    requests = 1 + went["pool-req-xchg"] + went["pool-orphan-xchg"]  # and the good one
    invalid = {name: counted(stack, "osrdyne_invalid_messages", queue=name) for name in INVALID}
    passed_on = stack.broker.count("publish", "pool-ctl-xchg")
    return {
        "requests": requests - waiting - refused(stack),
        "activity": went["pool-activity-xchg"] - counted(stack, "osrdyne_activity_reports") - invalid["activity"],
        "dead letters": went["pool-dl-xchg"] - counted(stack, "osrdyne_dead_letters") - invalid["dead-letters"],
        "cancels": went["pool-cancel-xchg"] - passed_on - invalid["cancel"],
    }


def not_logged_once(stack: Stack, log: list[dict[str, Any]]) -> dict[str, int]:
    """How many messages were refused and not logged, or logged more than once."""
    logged = Counter(event["event"] for event in log)
    phrases = {event: counted(stack, "osrdyne_invalid_messages", queue=queue) for queue, event in INVALID.items()}
    phrases |= {"request refused": refused(stack), "dead letter answered": counted(stack, "osrdyne_dead_letters")}
    return {phrase: count - logged[phrase] for phrase, count in phrases.items()}


def refused(stack: Stack) -> int:
    """Orphans that were answered."""
    return counted(stack, "osrdyne_orphans") - counted(stack, "osrdyne_orphans", outcome="forwarded")


@pytest.mark.proves("controller/leader-queue-holds-something", "hostile/hostile-messages-any-queue")
@pytest.mark.timeout(600)
def test_leader_is_unharmed_by_any_message(runner, log):
    @SETTINGS
    @given(NUMBERS)
    @example([60759659])  # equals a dead letter at the delivery limit
    def check(numbers: list[int]) -> None:
        assert runner.run(suffer([hostile_message(number, keys=KEYS) for number in numbers], log)) == {}

    check()


# --- a worker


ENVIRONMENT = WorkerEnvironment(
    worker_id=WorkerId("w"),
    key=Key("k"),
    pool=POOL,
    amqp_uri="amqp://fake",
    requests_queues=(QueueName("requests"),),
    activity_exchange="activity",
    control_exchange="control",
)


class Query(BaseModel):
    query: str
    limit: int = 10


def make_app() -> App:
    app = App()

    @app.handler("/echo")
    async def echo(call: Call, request: bytes) -> bytes:
        return request

    @app.handler("/typed")
    async def typed(call: Call, request: Query) -> Query:
        return request

    @app.handler("")
    def anything(call: Call, request: Any) -> Any:
        return request

    return app


class WorkerBench:
    """The runtime of a worker between a request queue and wherever replies are to go, on a broker in memory."""

    def __init__(self, group: asyncio.TaskGroup, threads: ThreadPoolExecutor) -> None:
        self.clock = VirtualClock()
        self.broker = FakeBroker(self.clock)
        self.ended: list[object] = []
        self.wanted = DesiredState((QueueName("requests"),))
        self.obeyed = 0
        self.reporter = Reporter(key=Key("k"), worker_id=WorkerId("w"), exchange="activity", clock=self.clock)
        self.processor = Processor(
            RuntimeContext(RuntimeSettings(), self.clock, group.create_task, self.ended.append),
            Context(Key("k"), worker_id="w"),
            dispatcher=Dispatcher(make_app(), threads=threads, side_threads=threads),
            reporter=self.reporter,
            answering=Answering(
                addresses=ReplyAddresses(PoolNames("pool")),
                replies=ReplySender("w", 2**20, self.clock),
                retries=Retries(None),
            ),
        )

        self.connection = FakeConnection(self.broker, ConnectionOptions("amqp://fake"))
        self.broker.declare_queue("requests", {})
        self.broker.declare_exchange(ENVIRONMENT.control_exchange, "topic", {})
        self.listening = group.create_task(
            listen(
                self.connection,
                ENVIRONMENT,
                self.obey,
                routing_keys=("worker.w",),
                on_listening=lambda: None,
                on_forged=lambda: None,
                warnings=ControlWarnings(),
                clock=self.clock,
            )
        )

    async def suffer(self, messages: Sequence[HostileMessage], log: list[dict[str, Any]]) -> dict[str, object]:
        """What is wrong with the worker after these messages, each as a request and as a control message."""
        await self.clock.settle()
        broker_connection = BrokerConnection(self.connection, await self.connection.channel(confirms=True), self.clock)
        consumer = await (await self.connection.channel()).consume("requests")
        for message in messages:
            _, decoded = message.decoded()
            await self.broker.publish(decoded, exchange=ENVIRONMENT.control_exchange, routing_key="worker.w")
            await self.broker.publish(decoded, exchange="", routing_key="requests")
            self.processor.accept(await consumer.get(), priority=0, broker=broker_connection)
        await self.processor.until_idle()
        not_understood = sum(event["event"] == "malformed control message" for event in log)
        wrong = {
            "not done": self.broker.look_up("requests").messages,
            "in flight": self.reporter.in_flight,
            "ended": self.ended,
            "not answered": sum(bool(message.decoded()[1].read.reply_to) for message in messages)
            - self.broker.count("publish"),
            "lost its queue": self.wanted.queues == (),
            "deaf": self.listening.done(),
            "not heard": len(messages) - self.obeyed - not_understood,
        }
        self.listening.cancel()
        return {what: evidence for what, evidence in wrong.items() if evidence}

    def obey(self, message: ControlMessage) -> None:
        """As the worker does, but for its end, which a `drain` asks for."""
        self.obeyed += 1
        self.wanted = apply_control(self.wanted, message)


@pytest.mark.proves("hostile/hostile-messages-any-queue")
@pytest.mark.timeout(600)
def test_worker_is_unharmed_by_any_message(runner, log):
    async def suffer_as_worker(messages):
        async with asyncio.TaskGroup() as group:
            with ThreadPoolExecutor(1) as threads:
                return await WorkerBench(group, threads).suffer(messages, log)

    @SETTINGS
    @given(NUMBERS)
    def check(numbers: list[int]) -> None:
        log.clear()
        assert runner.run(suffer_as_worker([hostile_message(number) for number in numbers])) == {}
        assert [event for event in log if event.get("exc_info")] == []

    check()

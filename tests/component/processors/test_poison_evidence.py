"""The deaths in a poison entry: the real leader on a broker in memory, in virtual time."""

import asyncio
import json

import pytest
from broker_steps import kill_within
from managed_pool import managing, publish_to, send, waiting

from osrdyne.amqp import Consumer
from osrdyne.config.models import RequestSettings
from osrdyne.pool.views import PoisonQuery
from osrdyne.processors.failures.dead_letters import MAX_PUT_BACKS
from osrdyne.processors.poison.evidence import PATIENCE
from osrdyne.protocol.activity import Event, fingerprint
from osrdyne.protocol.messages import FAILED_DELIVERIES_HEADER
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import PoisonRecord
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.stack import Stack, leading, settings_for

K = Key("k")
LIMIT = 3


class Pool:
    """A pool with a worker of `k`, and a caller."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.consumer: Consumer | None = None

    async def send(self, body: bytes) -> None:
        await self.stack.publish("k", body, correlation_id="c", reply_to="replies")
        await self.stack.clock.advance(1)

    async def report(self, *bodies: bytes, **others: tuple[bytes, ...]) -> None:
        """What the worker runs now; and what waits in it, or has returned."""
        fields = {
            name: [
                fingerprint(key="k", path="", correlation_id="c", reply_to="replies", message_id=None, body=body)
                for body in of_field
            ]
            for name, of_field in {"requests": bodies, **others}.items()
        }
        await self.stack.report("k", Event.BUSY, in_flight=len(bodies), **fields)

    def worker_dies(self) -> None:
        worker = self.stack.driver.workers_of(K)[0]
        self.stack.driver.exit_instance(worker.instance.instance_id, signal="SIGKILL", lines=("out of memory",))

    async def reject_to_the_end(self) -> None:
        """RabbitMQ counts until it has had enough."""
        self.consumer = self.consumer or await self.stack.consume("k")
        for _ in range(LIMIT):
            await self.stack.clock.settle()
            await (await self.consumer.get()).reject()
        await self.stack.clock.settle()

    async def entries(self) -> list[PoisonRecord]:
        return list((await self.stack.term.processors.poison.page(PoisonQuery(bodies=True))).entries)

    async def detail(self) -> str | None:
        answer = await FakeChannel(self.stack.broker).get("replies")
        return None if answer is None else str(json.loads(answer.body)["error"]["message"])


SETTINGS = settings_for().model_copy(update={"requests": RequestSettings(delivery_limit=LIMIT)})


@pytest.fixture
async def pool(clock, broker):
    async with leading(clock, broker=broker, settings=SETTINGS) as stack:
        yield Pool(stack)


async def test_death_noticed_after_the_dead_letter_is_waited_for(pool):
    await pool.send(b"deadly")
    await pool.report(b"deadly", b"beside")
    await pool.reject_to_the_end()
    assert await pool.detail() is None
    pool.worker_dies()
    await pool.stack.clock.settle()
    [entry] = await pool.entries()
    assert [(death.ended_with, death.others, death.log_lines) for death in entry.deaths] == [
        ("signal SIGKILL", 1, ("out of memory",))
    ]
    assert (entry.key, entry.body, entry.unexplained) == ("k", b"deadly", LIMIT - 1)
    assert "1 of 3 deliveries ended with the death" in str(await pool.detail())


@pytest.mark.proves("workers/innocent-request-reaches-delivery")
async def test_worker_that_lives_on_is_waited_for_and_not_blamed(pool):
    await pool.send(b"cut off")
    await pool.report(b"cut off")
    await pool.reject_to_the_end()
    await pool.stack.clock.advance(PATIENCE + 0.1)
    [entry] = await pool.entries()
    assert (entry.deaths, entry.unexplained) == ((), LIMIT)
    assert "may be innocent" in str(await pool.detail())


async def test_request_that_only_waited_in_the_queue_is_not_blamed(pool):
    await pool.send(b"innocent")
    await pool.report(b"deadly")
    pool.worker_dies()
    await pool.stack.clock.settle()
    await pool.reject_to_the_end()
    [entry] = await pool.entries()
    assert (entry.deaths, entry.unexplained) == ((), LIMIT)


@pytest.mark.parametrize("times", [1, 2, LIMIT, 9])
@pytest.mark.parametrize("field", ["waiting", "returned"])
@pytest.mark.proves("workers/others-end-the-workers")
async def test_request_returns_to_its_queue_once_for_what_it_has_not_caused(pool, field, times):
    await pool.send(b"innocent")
    for _ in range(times):
        await pool.report(b"deadly", **{field: (b"innocent",)})
        pool.worker_dies()
        await pool.stack.clock.advance(60)
    await pool.reject_to_the_end()
    await pool.stack.clock.advance(PATIENCE)
    [holder] = pool.stack.broker.queues["pool-req-k"].holders
    [copy] = [stored.message for stored in holder.held.values()]
    assert copy.headers[FAILED_DELIVERIES_HEADER] == max(1, LIMIT - times)
    await pool.reject_to_the_end()
    [entry] = await pool.entries()
    assert entry.body == b"innocent"


@pytest.mark.proves("workers/others-end-the-workers")
async def test_request_returns_to_the_queue_of_its_level_and_not_without_end(clock, broker):
    high = {"route": "FROM /* INTO $upstream", "priority": 2}
    async with managing(clock, broker, high=high) as stack:
        broker.declare_queue("replies", {})
        await send(stack, "k", b"innocent", correlation_id="c", reply_to="replies", expiration="600000")
        consumer = await FakeChannel(broker).consume(stack.names.request_queue(K, 2), prefetch=1)
        deliveries = 0
        while not broker.bodies("replies"):
            assert waiting(stack, 2, "k") == [b"innocent"]
            await Pool(stack).report(b"deadly", returned=(b"innocent",))
            await (await consumer.get()).reject()
            await clock.settle()
            deliveries += 1
    assert deliveries == (MAX_PUT_BACKS + 1) * stack.settings.requests.delivery_limit


@pytest.mark.parametrize("at", ["before the copy", "after the copy"])
@pytest.mark.proves("workers/others-end-the-workers")
async def test_leader_that_dies_while_it_puts_a_request_back_loses_nothing(clock, broker, at):
    step = ("publish", "pool-req-xchg", at == "after the copy")
    broker.declare_queue("replies", {})
    async with leading(clock, broker=broker, settings=SETTINGS) as stack:
        pool = Pool(stack)
        await pool.send(b"innocent")
        await pool.report(b"deadly", waiting=(b"innocent",))
        pool.worker_dies()
        await clock.advance(60)

        async def kill(command):
            if command == step:
                kill_within(stack)

        broker.hook = kill
        await pool.reject_to_the_end()
    broker.hook = None
    async with leading(clock, broker=broker, settings=SETTINGS) as stack:
        await clock.advance(5)
        assert len(broker.bodies("replies")) == 1  # the new leader has no evidence
        assert stack.waiting("k") == [b"innocent"] * (at == "after the copy")


@pytest.mark.proves("workers/no-leader-saw-the-failures")
async def test_request_at_its_limit_before_the_term_gets_one_more_round(clock, broker):
    broker.declare_queue("replies", {})
    async with leading(clock, broker=broker, settings=SETTINGS) as stack:
        await (pool := Pool(stack)).send(b"not reported")
        await stack.kill()
        await pool.reject_to_the_end()
        assert broker.bodies("pool-dl") == [b"not reported"]
    await clock.advance(60)
    async with leading(clock, broker=broker, settings=SETTINGS) as stack:
        await clock.advance(5)
        assert stack.waiting("k") == [b"not reported"]
        await pool.reject_to_the_end()
        await clock.advance(5)
        assert len(broker.bodies("replies")) == 1


async def test_readings_at_once_all_see_everything(direct):
    for number in range(3):
        await publish_to(direct, direct.names.poison_exchange, "", b"%d" % number)
    query = PoisonQuery(bodies=True)
    pages = await asyncio.gather(*(direct.term.processors.poison.page(query) for _ in range(3)))
    assert [len(page.entries) for page in pages] == [3, 3, 3]
    assert pages[0] == pages[1] == pages[2]

"""The deaths in a poison entry: the real leader on a broker in memory, in virtual time."""

import asyncio
import json

import pytest
from managed_pool import publish_to

from osrdyne.config.models import RequestSettings
from osrdyne.pool.views import PoisonQuery
from osrdyne.processors.poison.evidence import PATIENCE
from osrdyne.protocol.activity import Event, fingerprint
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

    async def send(self, body: bytes) -> None:
        await self.stack.publish("k", body, correlation_id="c", reply_to="replies")
        await self.stack.clock.advance(1)

    async def report(self, *bodies: bytes) -> None:
        """What the worker runs now."""
        requests = [
            fingerprint(key="k", path="", correlation_id="c", reply_to="replies", message_id=None, body=body)
            for body in bodies
        ]
        await self.stack.report("k", Event.BUSY, in_flight=len(requests), requests=requests)

    def worker_dies(self) -> None:
        worker = self.stack.driver.workers_of(K)[0]
        self.stack.driver.exit_instance(worker.instance.instance_id, signal="SIGKILL", lines=("out of memory",))

    async def reject_to_the_end(self) -> None:
        """RabbitMQ counts until it has had enough."""
        consumer = await self.stack.consume("k")
        for _ in range(LIMIT):
            await self.stack.clock.settle()
            await (await consumer.get()).reject()
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


async def test_readings_at_once_all_see_everything(direct):
    for number in range(3):
        await publish_to(direct, direct.names.poison_exchange, "", b"%d" % number)
    query = PoisonQuery(bodies=True)
    pages = await asyncio.gather(*(direct.term.processors.poison.page(query) for _ in range(3)))
    assert [len(page.entries) for page in pages] == [3, 3, 3]
    assert pages[0] == pages[1] == pages[2]

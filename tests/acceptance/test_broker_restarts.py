"""RabbitMQ goes away under load and comes back: so do the daemon and its workers, by themselves, without a loss."""

import asyncio

import pytest
from durable_caller import DurableCaller, durable_caller

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker

pytestmark = pytest.mark.rabbitmq4

KEYS = ("infra=42,timetable=24", "a", "b")
UNANSWERED = 5
"""So many requests of a key wait for their answers; more would only show how fast the machine is."""
DOWN = 5.0
"""Seconds without a broker: longer than all delays of the pool together."""


@pytest.fixture
async def own_broker():
    async with EmbeddedBroker() as broker:
        yield broker


async def keep_asking(caller: DurableCaller, key: str, stop: asyncio.Event) -> None:
    asked: list[str] = []
    while not stop.is_set():
        if len(caller.unanswered(asked)) < UNANSWERED:
            asked.append(await caller.send(key, "/sleep", {"seconds": 0.05}))
        await asyncio.sleep(0.05)


@pytest.mark.proves("broker/rabbitmq-stops-killed-restarts", "reference-defects/4-broker-restart-lost")
async def test_broker_restarted_under_load_costs_no_request_and_no_worker(own_broker, make_daemon):
    """First it is stopped in order, then it is killed."""
    daemon = make_daemon(
        amqp_uri=own_broker.amqp_uri,
        management_uri=own_broker.management_uri,
        pool="restart",
        lifecycle={"unbind_delay": "3s", "stop_delay": "1s"},
    )
    stop = asyncio.Event()
    async with durable_caller(own_broker.amqp_uri, "restart") as caller, daemon.watching_for_twins():
        await daemon.start()
        async with asyncio.TaskGroup() as group:
            for key in KEYS:
                group.create_task(keep_asking(caller, key, stop))
            pids = {key: (await caller.info(key))["pid"] for key in KEYS}
            for end in (own_broker.stop, own_broker.kill):
                await end()
                await asyncio.sleep(DOWN)
                assert daemon.is_running
                assert daemon.workers()
                await own_broker.start()
                await daemon.until_leading()
                await asyncio.sleep(1)
            stop.set()
        await caller.until_all_answered()
        assert {key: (await caller.info(key))["pid"] for key in KEYS} == pids
    assert caller.statuses() == {"ok"}
    assert not daemon.events("worker stopping")
    assert not daemon.events("group ends")

"""Retries on a real RabbitMQ, with a real worker: the wait, and the way back."""

import asyncio
import json
import time

import pytest
from broker_api import until
from worker_process import PATIENCE, Stage, stage

from osrdyne.amqp import Message
from osrdyne.broker.management.apply import declare_topology
from osrdyne.broker.queues.retry_queues import retry_bindings, retry_exchanges, retry_queues
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.processors.failures.dead_letters import last_death
from osrdyne.protocol.activity import outcomes_of
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.retries import ATTEMPTS_HEADER, CLASS_HEADER, DELAY_HEADER, TERMS_HEADER, RetryTerms, class_name
from osrdyne.protocol.statuses import Status, decode_text

pytestmark = [pytest.mark.rabbitmq4, pytest.mark.usefixtures("processes")]

APP = "tests.integration.flaky_app:app"
DELAY_MS, LONG_MS = 300, 3_600_000
URGENT = 3


@pytest.fixture
async def pool(broker, pool_id):
    """What the controller makes of a managed pool, with two delays and the classes default and 3."""
    async with stage(broker.amqp_uri, pool_id, forked=True) as result:
        names, channel = result.names, result.channel
        await channel.declare_exchange(names.orphan_exchange, "fanout")
        await channel.declare_queue(names.orphan_queue, arguments={"x-queue-type": "quorum"})
        await channel.bind_queue(names.orphan_queue, names.orphan_exchange)
        layout = QueueLayout(names, managed=True, priorities=[URGENT])
        for topology in (
            layout.exchanges,
            retry_exchanges(names, [URGENT]),
            retry_queues(names, [DELAY_MS, LONG_MS]),
            retry_bindings(names, [DELAY_MS, LONG_MS]),
        ):
            await declare_topology(channel, topology)
        await result.declare_request_queue(names.request_queue(result.key, URGENT))
        for queue in layout.queues(result.key):
            await channel.bind_queue(queue.name, queue.exchange, result.key)
        yield result


async def send(
    pool: Stage, failures: int, *, attempts: int, priority: int | None = None, delay_ms: int = DELAY_MS
) -> str:
    """Publish a request as the ingress does, with the key for the routing key; its correlation id."""
    names = pool.names
    await pool.channel.unbind_queue(names.request_queue(pool.key), names.requests_exchange, pool.key)
    await pool.channel.bind_queue(names.request_queue(pool.key, priority), names.requests_exchange, pool.key)
    headers = {
        TERMS_HEADER: RetryTerms(("5xx",), attempts, (delay_ms,)).to_header(),
        CLASS_HEADER: class_name(priority),
    }
    return await pool.caller.send("/flaky", {"failures": failures}, headers=headers)


@pytest.mark.proves("managed/request-fails-route-retries")
async def test_failed_request_is_tried_again_after_its_delay_and_holds_nothing_meanwhile(pool):
    queues = tuple(pool.names.request_queue(pool.key, priority) for priority in (URGENT, None))
    await pool.start(app=APP, queues=queues, variables={"WORKER_RETRY_EXCHANGE": pool.names.retry_exchange})
    # The last attempt is answered, and reported under the name of the others.
    last = await pool.caller.answer(await send(pool, 5, attempts=2))
    assert (last.status, last.code, last.headers[ATTEMPTS_HEADER]) == (Status.ERROR, 503, 2)
    await until(lambda: sum(bool(outcomes_of(report)) for report in pool.reports), equals=2)
    found = [report for report in pool.reports if outcomes_of(report)]
    assert [decode_text(one.headers["x-status"]) for one in found] == ["retried", "error"]
    assert outcomes_of(found[0]) == outcomes_of(found[1])

    for priority in (None, URGENT):
        began = time.monotonic()
        response = await pool.caller.answer(await send(pool, 2, attempts=3, priority=priority))
        assert time.monotonic() - began >= 2 * DELAY_MS / 1000
        assert (response.status, json.loads(response.body)) == (Status.OK, {"attempt": 3, "duplicate": False})
        assert response.headers[ATTEMPTS_HEADER] == 3

    await send(pool, 1, attempts=2, priority=URGENT, delay_ms=LONG_MS)
    response = await pool.caller.answer(await send(pool, 0, attempts=2, priority=URGENT))
    assert json.loads(response.body)["attempt"] == 1
    assert (await pool.channel.declare_queue(pool.names.retry_queue(LONG_MS), passive=True)).ready == 1


@pytest.mark.proves("managed/request-kills-worker-later")
async def test_death_after_a_wait_is_the_one_that_counts(pool, pool_id):
    names = PoolNames(pool_id)
    dying = f"{pool_id}-dying"
    await pool.channel.declare_exchange(names.dead_letter_exchange, "fanout")
    await pool.channel.declare_queue(names.dead_letter_queue, arguments={"x-queue-type": "quorum"})
    await pool.channel.bind_queue(names.dead_letter_queue, names.dead_letter_exchange)
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": 0, "x-dead-letter-exchange": names.dead_letter_exchange}
    await pool.channel.declare_queue(dying, arguments=arguments)
    await pool.channel.bind_queue(dying, names.work_exchange(URGENT), "mortal")
    headers = {CLASS_HEADER: class_name(URGENT), DELAY_HEADER: str(DELAY_MS), ATTEMPTS_HEADER: 1}
    await pool.channel.publish(Message(headers=headers), exchange=names.retry_exchange, routing_key="mortal")
    channel = await pool.connection.channel()
    async with asyncio.timeout(PATIENCE):
        delivery = await (await channel.consume(dying)).get()
        await delivery.reject(requeue=True)
    headers = (await until(lambda: pool.channel.get(names.dead_letter_queue))).headers
    assert headers["x-first-death-reason"] == "expired"  # the end of the wait
    assert last_death(headers, names)[:2] == (Status.DELIVERY_LIMIT, dying)

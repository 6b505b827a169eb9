"""What the expiry sweeper relies on in RabbitMQ, and a sweep by a whole daemon; the test plays the workers."""

import asyncio

import pytest
from broker_api import ready_in, until
from daemon_in_process import PATIENCE, managed_settings, running_daemon

from osrdyne import amqp
from osrdyne.amqp import Consumer, Delivery
from osrdyne.broker.topology.declarations import request_queue_arguments
from osrdyne.config.models import RequestSettings
from osrdyne.processors.expiry.sweeper import CONSUME_FIRST, PREFETCH
from osrdyne.protocol.messages import DUPLICATE_HEADER
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.statuses import decode_text

pytestmark = pytest.mark.usefixtures("processes")

REQUESTS = 500


async def take(consumer: Consumer, number: int) -> list[Delivery]:
    async with asyncio.timeout(PATIENCE):
        return [await consumer.get() for _ in range(number)]


def numbers(deliveries: list[Delivery]) -> list[int]:
    return [int(delivery.body) for delivery in deliveries]


@pytest.fixture
async def queue(connection, channel, pool_id):
    """A queue with numbered requests, of which a worker holds the first."""
    name = PoolNames(pool_id).request_queue(Key("k"))
    await channel.declare_queue(name, arguments=request_queue_arguments(PoolNames(pool_id), Key("k")))
    publishing = await connection.channel(confirms=True)
    for number in range(REQUESTS):
        message = amqp.Message(body=b"%d" % number)
        await publishing.publish(message, exchange="", routing_key=name)
    return name


async def test_sweep_takes_all_that_is_ready_before_workers_and_gives_the_rest_back_in_its_order(
    connection, channel, queue
):
    worker = await channel.consume(queue, prefetch=1)
    [held] = await take(worker, 1)
    first = await connection.channel()
    consumer = await first.consume(queue, prefetch=PREFETCH, arguments=CONSUME_FIRST)
    await held.ack()  # there is room for one more now
    await until(lambda: ready_in(first, queue), equals=0)
    await first.declare_queue(queue, passive=True)
    assert (consumer.waiting(), worker.waiting()) == (REQUESTS - 1, 0)
    taken = await take(consumer, REQUESTS - 1)
    assert numbers(taken) == list(range(1, REQUESTS))
    await channel.cancel(worker)
    await first.cancel(consumer)
    for delivery in reversed(taken[REQUESTS // 2 :]):
        await delivery.ack()
    publishing = await connection.channel(confirms=True)
    await publishing.publish(amqp.Message(body=b"9999"), exchange="", routing_key=queue)
    await first.ping()
    await first.close()
    again = await take(await channel.consume(queue), REQUESTS // 2 + 1)
    assert numbers(again) == [*range(1, REQUESTS // 2 + 1), 9999]


@pytest.fixture
async def daemon(broker_settings, pool_id, tmp_path):
    requests = RequestSettings(check_entire_queue_on_cleanup=True, cleanup_interval=1, max_clock_skew=0.5)
    async with running_daemon(managed_settings(broker_settings, pool_id, tmp_path, requests=requests)) as daemon:
        yield daemon


async def test_expired_requests_are_answered_while_the_head_of_their_queue_waits(daemon, connection, channel, pool_id):
    names, replies = PoolNames(pool_id), f"{pool_id}-answers"
    await channel.declare_queue(replies, exclusive=True)
    publishing = await connection.channel(confirms=True)
    for number in range(100):
        fields = {"correlation_id": str(number), "expiration": "2000" if number % 2 else "600000"}
        message = amqp.Message(body=b"%d" % number, reply_to=replies, **fields)
        await publishing.publish(message, exchange=names.requests_exchange, routing_key="k")
    answers = await take(await channel.consume(replies, no_ack=True), 50)
    statuses = {decode_text(answer.headers["x-status"]) for answer in answers}
    assert sorted(int(answer.properties.correlation_id or "") for answer in answers) == list(range(1, 100, 2))
    queue = names.request_queue(Key("k"))

    await until(lambda: ready_in(channel, queue), equals=50)
    kept = await take(await channel.consume(queue), 50)
    assert (statuses, numbers(kept)) == ({"expired"}, list(range(0, 100, 2)))
    assert all(one.headers[DUPLICATE_HEADER] is True and not one.redelivered for one in kept)

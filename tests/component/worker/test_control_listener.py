"""The listener of control messages on a fake broker, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from osrdyne.amqp import ConnectionOptions
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, PoolNames, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne_worker.runtime.control import ControlWarnings, listen

NAMES = PoolNames("p")
WORKER = WorkerId("w")
ENVIRONMENT = WorkerEnvironment(
    worker_id=WORKER,
    key=Key("k"),
    pool="p",
    amqp_uri="amqp://fake",
    requests_queues=(),
    activity_exchange=NAMES.activity_exchange,
    control_exchange=NAMES.control_exchange,
)


@pytest.mark.proves("workers/rabbitmq-cancels-worker-s")
async def test_consumers_that_rabbitmq_cancels_leave_no_channel_open(broker: FakeBroker, clock: VirtualClock) -> None:
    """RabbitMQ cancels a consumer when its queue is deleted, and keeps the channel."""
    broker.declare_exchange(NAMES.control_exchange, "direct", {})
    connection = FakeConnection(broker, ConnectionOptions("amqp://fake"))
    listening = asyncio.create_task(
        listen(
            connection,
            ENVIRONMENT,
            lambda message: None,
            routing_keys=("w",),
            on_listening=lambda: None,
            on_forged=lambda: None,
            warnings=ControlWarnings(),
            clock=clock,
        )
    )
    await clock.settle()
    for _ in range(3):
        broker.delete_queue(NAMES.control_queue(WORKER))
        await clock.advance(2.0)
    assert NAMES.control_queue(WORKER) in broker.queues
    assert [channel.is_closed for channel in connection.channels].count(False) == 1
    await connection.close()
    await clock.advance(2.0)
    await listening

"""The reports of a worker whose connection is lost, on a fake broker."""

from __future__ import annotations

import asyncio

from osrdyne.amqp import ConnectionOptions
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne_worker.runtime.reports import Reporter


async def test_redelivered_request_waits_for_no_report_without_a_connection() -> None:
    clock = VirtualClock()
    broker = FakeBroker(clock)
    broker.declare_exchange("activity", "fanout", {})
    reporter = Reporter(key=Key("k"), worker_id=WorkerId("w"), exchange="activity", clock=clock)
    sending = asyncio.create_task(reporter.send(FakeConnection(broker, ConnectionOptions("amqp://fake"))))
    await reporter.confirm_running()
    await clock.settle()
    await reporter.confirm_running()
    assert broker.count("ping") == 1
    sending.cancel()
    await asyncio.wait({sending})
    confirming = asyncio.create_task(reporter.confirm_running())
    await asyncio.sleep(0)
    assert confirming.done()

"""Suites for the broker in memory and for RabbitMQ take the fixture `lead`."""

import pytest
from leader_terms import leading

from osrdyne import amqp
from osrdyne.aio.clock import SystemClock
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import PoolSettings, Settings
from osrdyne.testing.fakes.amqp import connect_to
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.management import FakeManagement


@pytest.fixture(params=["memory", "rabbitmq"])
async def lead(request):
    if request.param == "memory":
        settings, broker = Settings(pool=PoolSettings(id="p")), FakeBroker(SystemClock())
        yield lambda: leading(settings, connect_to(broker), FakeManagement(broker), broker)
        return
    pool_id, broker_settings = (request.getfixturevalue(name) for name in ("pool_id", "broker_settings"))
    settings = Settings(pool=PoolSettings(id=pool_id), broker=broker_settings)
    async with ManagementClient(broker_settings) as management:
        yield lambda: leading(settings, amqp.connect, management)

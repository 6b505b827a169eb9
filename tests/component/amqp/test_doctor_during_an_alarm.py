"""`doctor` while RabbitMQ blocks publishers."""

import asyncio
from unittest.mock import Mock

import pytest
from pydantic import SecretStr
from scripted_broker import PATIENCE

from osrdyne.broker.doctor import run
from osrdyne.config.models import BrokerSettings, RequestSettings, Settings
from osrdyne.errors import BrokerUnavailableError


@pytest.mark.proves("broker/memory-disk-alarm")
async def test_doctor_does_not_wait_during_an_alarm(broker, monkeypatch):
    monkeypatch.setattr(run, "ManagementClient", Mock(side_effect=BrokerUnavailableError("not part of this test")))
    broker.has_alarm = True
    settings = Settings(
        broker=BrokerSettings(uri=SecretStr("amqp://u@h"), rpc_timeout=100 * PATIENCE),
        requests=RequestSettings(max_message_bytes=1024),
    )
    async with asyncio.timeout(PATIENCE):
        findings = await run.run_broker_checks(settings)
    assert {one.subject for one in findings if not one.ok} == {"message size", "HTTP API"}

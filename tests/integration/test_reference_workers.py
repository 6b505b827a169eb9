"""A worker that knows only the reference's variables and reports under a real daemon, with the subprocess driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from daemon_in_process import PATIENCE, echo_settings, running_daemon

from osrdyne.client import AsyncClient
from osrdyne.config.models import BrokerSettings, DriverSettings, Settings

pytestmark = pytest.mark.usefixtures("processes")

WORKER = Path(__file__).with_name("reference_worker.py")


def reference_settings(broker: BrokerSettings, pool: str, directory: Path) -> Settings:
    """Workers of `reference_worker.py`, with users of their own."""
    settings = echo_settings(broker.model_copy(update={"scoped_credentials": True}), pool, directory)
    options = settings.driver.options | {"command": [sys.executable, str(WORKER)]}
    worker = settings.worker.model_copy(update={"environment": "reference"})
    return settings.model_copy(update={"driver": DriverSettings(options=options), "worker": worker})


async def test_worker_of_the_reference_starts_and_answers(broker_settings, pool_id, tmp_path):
    settings = reference_settings(broker_settings, pool_id, tmp_path)
    uri = settings.broker.effective_uri()
    async with running_daemon(settings), AsyncClient(uri, pool_id, default_timeout=PATIENCE) as client:
        answer = (await client.call("infra=42", "/anything")).json()
    assert answer["key"] == "infra=42"
    assert "WORKER_AMQP_URI" in answer["variables"]
    assert "WORKER_AMQP_URI_FILE" not in answer["variables"]

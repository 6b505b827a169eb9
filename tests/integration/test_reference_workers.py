"""A worker that knows only the reference's variables and reports under a real daemon, with a user of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from daemon_in_process import PATIENCE, echo_settings, running_daemon

from osrdyne.client import AsyncClient
from osrdyne.config.models import DriverSettings

pytestmark = pytest.mark.usefixtures("processes")

WORKER = Path(__file__).parents[1] / "acceptance" / "plain_worker.py"


async def test_worker_of_the_reference_starts_and_answers(broker_settings, pool_id, tmp_path):
    settings = echo_settings(broker_settings.model_copy(update={"scoped_credentials": True}), pool_id, tmp_path)
    options = settings.driver.options | {"command": [sys.executable, str(WORKER)]}
    worker = settings.worker.model_copy(update={"environment": "reference"})
    settings = settings.model_copy(update={"driver": DriverSettings(options=options), "worker": worker})
    uri = settings.broker.effective_uri()
    async with running_daemon(settings), AsyncClient(uri, pool_id, default_timeout=PATIENCE) as client:
        answer = await client.call("infra=42", "/anything", b"body")
    assert answer.body == f"{pool_id}|infra=42|/anything|body".encode()

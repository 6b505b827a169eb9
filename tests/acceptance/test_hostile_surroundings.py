"""What is wrong around a daemon is one clear sentence and a retry, or an answer to those concerned. No traceback."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from daemon_process import ROOT, DaemonProcess, MakeDaemon, free_port, until
from durable_caller import DurableCaller

from osrdyne import amqp
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.protocol.names import Key, PoolNames

pytestmark = pytest.mark.one_rabbitmq


async def until_it_retries(daemon: DaemonProcess) -> str:
    """The one sentence that a daemon gives, again and again, as the reason why it does not lead."""
    daemon.launch()
    await until(lambda: not daemon.is_running or len(daemon.events("term ended")) >= 2, "it tried twice")
    assert daemon.is_running, daemon.log()

    [sentence] = {entry["error"] for entry in daemon.events("term ended")}

    async def says_why() -> bool:
        # Perhaps not at the first question: between two attempts the daemon stands by for a moment, and is ready then.
        ready = await daemon.get("/ready")
        details = {component["detail"] for component in ready.get("components", ())}
        return ready.get("ready") is False and sentence in details

    await until(says_why, "the daemon is not ready, and says why")
    assert await daemon.stop() == 0
    return str(sentence)


@pytest.mark.proves("broker/wrong-password-management-plugin")
async def test_wrong_password_is_reported_and_not_shown(
    make_daemon: MakeDaemon, broker_settings: BrokerSettings
) -> None:
    parts = urlsplit(broker_settings.uri.get_secret_value())
    daemon = make_daemon(amqp_uri=f"amqp://guest:hidden@{parts.hostname}:{parts.port}/")
    sentence = await until_it_retries(daemon)
    assert "refuse" in sentence
    assert "hidden" not in daemon.log()


@pytest.mark.nightly
async def test_broker_that_is_not_there_is_named(make_daemon: MakeDaemon) -> None:
    port = free_port()
    assert f"127.0.0.1:{port}" in await until_it_retries(make_daemon(amqp_uri=f"amqp://guest:hidden@127.0.0.1:{port}/"))


@pytest.mark.nightly
@pytest.mark.proves("broker/wrong-password-management-plugin")
async def test_broker_without_management_plugin_is_reported_with_the_remedy(make_daemon: MakeDaemon) -> None:
    sentence = await until_it_retries(make_daemon(management_uri=f"http://guest:hidden@127.0.0.1:{free_port()}"))
    assert "management" in sentence
    assert "hidden" not in sentence


@pytest.mark.proves("broker/wrong-password-management-plugin")
async def test_foreign_controller_queue_is_named_and_the_daemon_recovers(
    make_daemon: MakeDaemon, channel: amqp.Channel, pool_id: str, management: ManagementClient, caller: DurableCaller
) -> None:
    orphans = PoolNames(pool_id).orphan_queue
    await channel.declare_queue(orphans)
    daemon = make_daemon()
    assert orphans in await until_it_retries(daemon)
    await channel.delete_queue(orphans)
    await daemon.start()
    await caller.info("k")


@pytest.mark.nightly
@pytest.mark.parametrize("found", ["while it runs", "at its start"])
@pytest.mark.proves("reference-defects/6-one-failed-queue")
async def test_foreign_request_queue_concerns_its_key_only(
    make_daemon: MakeDaemon, channel: amqp.Channel, pool_id: str, caller: DurableCaller, found: str
) -> None:
    daemon = make_daemon()
    queue = PoolNames(pool_id).request_queue(Key("k"))
    if found == "at its start":
        await channel.declare_queue(queue)
    await daemon.start()
    await channel.declare_queue(queue)
    answer = await caller.call("k")
    assert answer.status == "start-failed"
    assert queue in str(answer.detail)
    assert "delete it" in str(answer.detail)
    await caller.info("other")
    assert len(daemon.events("leading")) == 1
    assert daemon.pids("k") == []


SPARK: dict[str, Any] = {
    "app": "osrdyne_worker.pipelines.sql:app",
    "config": {"datasets": [{"key": "k", "tables": [{"view": "v", "path": "/nowhere.parquet"}]}]},
}


@pytest.mark.nightly
async def test_missing_java_is_reported_to_the_caller(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Any
) -> None:
    options = {"command": None, "environment": {"PATH": str(tmp_path), "JAVA_HOME": ""}, "cwd": str(ROOT)}
    daemon = make_daemon(worker=SPARK, driver={"options": options})
    await daemon.start()
    answer = await caller.call("k", "/sql", {"query": "select 1"})
    assert answer.status == "start-failed"
    assert "Java" in str(answer.detail)
    assert "Traceback" not in str(answer)

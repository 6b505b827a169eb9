"""The private RabbitMQ node: it serves, keeps its data, and leaves nothing behind however it ends."""

import stat
from pathlib import Path

import psutil
import pytest
from broker_api import until
from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.broker.doctor.run import run_broker_checks
from osrdyne.config.models import BrokerSettings, RequestSettings, Settings, WorkerSettings
from osrdyne.dev.rabbitmq import embedded
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.dev.rabbitmq.node_files import NodeIdentity, is_free
from osrdyne.errors import BrokerError, BrokerUnavailableError, ConfigurationError, PortTakenError

pytestmark = [pytest.mark.nightly, pytest.mark.one_rabbitmq, pytest.mark.usefixtures("processes")]

QUEUE, QUORUM = "kept", {"x-queue-type": "quorum"}


async def count_ready(broker: EmbeddedBroker, *bodies: bytes) -> int:
    """How many messages the queue has that is to be kept, once these are in it."""
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker.amqp_uri))
    channel = await connection.channel(confirms=True)
    await channel.declare_queue(QUEUE, arguments=QUORUM)
    for body in bodies:
        await channel.publish(amqp.Message(body), exchange="", routing_key=QUEUE)
    ready = (await channel.declare_queue(QUEUE, passive=True)).ready
    await connection.close()
    return ready


async def test_data_and_address_survive_stop_kill_crash_and_a_new_object(tmp_path):
    directory = tmp_path / "node"
    broker = EmbeddedBroker(directory, consumer_timeout=7200)
    await broker.start()
    uri = broker.amqp_uri
    await count_ready(broker, b"x")
    await broker.stop()
    async with EmbeddedBroker(directory) as again:
        assert (again.amqp_uri, await count_ready(again)) == (uri, 1)
        await again.kill()
        assert not again.is_running
        with pytest.raises(BrokerUnavailableError):
            await amqp.connect(amqp.ConnectionOptions(uri=again.amqp_uri))
        await again.start()
        kill_from_outside(directory)
        await until(lambda: not again.is_running)
        await again.start()
        assert (again.amqp_uri, await count_ready(again)) == (uri, 1)
    assert all(map(is_free, (again.amqp_port, again.management_port)))


def kill_from_outside(directory: Path) -> None:
    """What the kernel does when memory runs out."""
    [node] = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "beam.smp" and process.environ().get("HOME") == str(directory)
    ]
    node.kill()


async def test_a_started_node_is_private_allows_long_work_and_leaves_nothing():
    settings = Settings(worker=WorkerSettings(processing_timeout=7200), requests=RequestSettings(consumer_timeout=7500))
    broker = EmbeddedBroker(consumer_timeout=settings.effective_consumer_timeout())
    async with broker:
        node, directory = NodeIdentity.load_or_create(broker.directory), broker.directory
        files = [broker.directory / name for name in ("rabbitmq.conf", "node.json", ".erlang.cookie")]
        assert not [file for file in files if stat.S_IMODE(file.stat().st_mode) & 0o077]
        assert "consumer_timeout = 7500000" in files[0].read_text()
        access = BrokerSettings(
            uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri), scoped_credentials=True
        )
        findings = await run_broker_checks(settings.model_copy(update={"broker": access}))
        assert [finding for finding in findings if not finding.ok] == []
        assert node.password not in f"{broker!r} {node!r}"
        with pytest.raises(PortTakenError, match="another directory"):
            await EmbeddedBroker(broker.directory).start()
    assert not broker.is_running
    assert not directory.exists()
    await until(lambda: all(map(is_free, node.ports(tls=False))))


async def test_a_node_that_cannot_start_reports_why(tmp_path, monkeypatch):
    directory = tmp_path / "node"
    broker = EmbeddedBroker(directory)
    (directory / "data").mkdir(parents=True)
    (directory / "data" / "osrdyne@localhost").write_text("not a directory")
    with pytest.raises(BrokerError, match="RabbitMQ"):
        await broker.start()
    assert not broker.is_running
    monkeypatch.setattr(embedded, "_SERVERS", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigurationError, match="apt-get install rabbitmq-server"):
        await EmbeddedBroker().start()

"""A request that kills Spark's JVM whenever it runs: what it costs the other callers of its key."""

import asyncio
import sys
from pathlib import Path

import pytest

from osrdyne.client import RequestPoisonedError
from tests.acceptance.daemon_process import DaemonProcess, until
from tests.spark_fixtures import SHORT_LIVED

pytestmark = pytest.mark.usefixtures("java")

LONG = 400.0
"""Seconds for the starts of three workers with Spark on a machine under load."""
DEADLY = {"text": "the same"}


@pytest.mark.timeout(900)
async def test_request_that_kills_spark_runs_last_alone_and_at_most_twice(broker_settings, pool_id, tmp_path):
    journal = tmp_path / "journal"
    worker = Path(sys.executable).with_name("osrdyne-worker")
    daemon = DaemonProcess(
        tmp_path,
        amqp_uri=broker_settings.uri.get_secret_value(),
        management_uri=broker_settings.effective_management_uri(),
        pool=pool_id,
        settings={
            "driver": {"options": {"command": [str(worker), "tests.security.killer_app:app"]}},
            "worker": {
                "concurrency": 2,
                "config": {"journal": str(journal)},
                "spark_master": "local[1]",
                "spark_conf": {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": SHORT_LIVED},
            },
        },
    )

    def ran():
        """Which process did what, in this order."""
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]

    try:
        await daemon.start()
        async with daemon.client(default_timeout=LONG) as client:
            deadly = asyncio.create_task(client.call("k", "/kill", DEADLY))
            await until(lambda: daemon.events("worker ended", key="k"), "its first worker is dead", timeout=LONG)
            others = [client.call("k", "/count", {"n": n}) for n in range(1, 5)]
            assert [reply.json() for reply in await asyncio.gather(*others)] == [1, 2, 3, 4]
            with pytest.raises(RequestPoisonedError):
                await deadly
            with pytest.raises(RequestPoisonedError):
                await client.call("k", "/kill", DEADLY)
            assert (await client.call("k", "/count", {"n": 5})).json() == 5
    finally:
        await daemon.close()

    (first, _), *rest = ran()
    second = rest[0][0]
    assert first != second
    served = [(second, f"counted {n}") for n in range(1, 5)]
    assert sorted(rest[:4]) == served, "the others go first, in the worker after the first restart"
    assert rest[4] == (second, "kills")
    assert [what for _, what in rest[5:]] == ["counted 5"], "it is not run a third time"
    assert len(daemon.events("worker started", key="k")) == 3

"""Workers whose Spark runs on a cluster: a real standalone cluster, and `local-cluster`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from osrdyne.client import AsyncClient, StartFailedError
from osrdyne.config.models import BrokerSettings
from tests.acceptance.daemon_process import DaemonProcess, until
from tests.spark_starts.standalone_cluster import PATIENCE, StandaloneCluster, pid_of_task

START_TIMEOUT = 150
WORKER = Path(sys.executable).with_name("osrdyne-worker")
SMALL = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.pyspark.python": sys.executable,
    "spark.driver.host": "127.0.0.1",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
    "spark.dynamicAllocation.shuffleTracking.timeout": "2s",
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[StandaloneCluster]:
    directory = tmp_path / "cluster"
    directory.mkdir()
    cluster = StandaloneCluster(directory)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def daemon(broker_settings: BrokerSettings, pool_id: str, tmp_path: Path) -> AsyncIterator[DaemonProcess]:
    daemon = DaemonProcess(
        tmp_path,
        amqp_uri=broker_settings.uri.get_secret_value(),
        management_uri=broker_settings.effective_management_uri(),
        pool=pool_id,
        settings={
            "driver": {"options": {"command": [str(WORKER), "tests.spark_starts.cluster_app:app"]}},
            "worker": {"spark_conf": SMALL, "cores": 2, "concurrency": 2},
            "lifecycle": {"start_timeout": START_TIMEOUT},
        },
    )
    yield daemon
    await daemon.close()


async def start(daemon: DaemonProcess, master: str) -> AsyncClient:
    daemon.write_settings(worker={"spark_master": master})
    await daemon.start()
    return daemon.client(default_timeout=2 * PATIENCE)


def holding(directory: Path, *, seconds: float) -> dict[str, object]:
    directory.mkdir()
    return {"tasks": 2, "seconds": seconds, "directory": str(directory)}


@pytest.mark.timeout(1500)
async def test_keys_on_a_standalone_cluster(cluster: StandaloneCluster, daemon: DaemonProcess, tmp_path: Path) -> None:
    async with await start(daemon, cluster.url) as client:
        assert (await client.call("a", "/sum")).json() == 499500
        assert (await client.call("a", "/udf")).json() == ["aa", "bb"]

        # A cancel frees the executors of the cancelled job: they go when they are idle.
        cancelled = tmp_path / "cancelled"
        request = asyncio.create_task(client.call("a", "/hold", holding(cancelled, seconds=3600)))
        await pid_of_task(cancelled, 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(lambda: not cluster.executors(), "an idle worker holds no executor", timeout=PATIENCE)

        # A killed executor costs its tasks a second attempt, and the caller nothing.
        killed = tmp_path / "killed"
        request = asyncio.create_task(client.call("a", "/hold", holding(killed, seconds=8)))
        await pid_of_task(killed, 0)
        cluster.executors()[0].kill()
        assert (await request).json() == 1

        # While the jobs of one key hold all cores, another key's worker cannot start; its caller gets the reason.
        full = tmp_path / "full"
        request = asyncio.create_task(client.call("a", "/hold", holding(full, seconds=3600)))
        await pid_of_task(full, 1)
        with pytest.raises(StartFailedError, match=r"has started no executor within .* it has no free cores or memory"):
            await client.call("b", "/sum")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


@pytest.mark.timeout(1500)
async def test_master_that_goes_away_and_comes_back(cluster: StandaloneCluster, daemon: DaemonProcess) -> None:
    async with await start(daemon, cluster.url) as client:
        assert (await client.call("a", "/sum")).json() == 499500
        cluster.kill_master()
        with pytest.raises(StartFailedError, match=r"cannot be reached: .* does not accept connections"):
            await client.call("b", "/sum")
        await cluster.start_master()
        assert (await client.call("c", "/sum")).json() == 499500
        # The new master does not know the application of the first key. Its worker notices and is replaced.
        assert (await client.call("a", "/sum")).json() == 499500


@pytest.mark.timeout(1500)
async def test_key_on_a_local_cluster(daemon: DaemonProcess) -> None:
    async with await start(daemon, "local-cluster[2,1,1024]") as client:
        assert (await client.call("a", "/sum")).json() == 499500
        assert (await client.call("a", "/udf")).json() == ["aa", "bb"]

"""A standalone cluster and a daemon whose workers run on a cluster."""

import sys
from pathlib import Path

import pytest

from tests.acceptance.daemon_process import DaemonProcess
from tests.spark_starts.standalone_cluster import StandaloneCluster

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


@pytest.fixture(scope="session", autouse=True)
def all_start_spark(java):
    """In processes of their own."""


@pytest.fixture
async def cluster(tmp_path):
    directory = tmp_path / "cluster"
    directory.mkdir()
    cluster = StandaloneCluster(directory)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def daemon(broker_settings, pool_id, tmp_path):
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

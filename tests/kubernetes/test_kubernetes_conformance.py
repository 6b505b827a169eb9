"""The conformance suite on the Kubernetes driver: a real API server and controller manager, and a played kubelet."""

import asyncio
import hashlib
import tempfile
from pathlib import Path

import pytest
from harness import harness_for

from osrdyne.protocol.names import started_as
from osrdyne.testing.driver_conformance import BackendConformance, WorkerConformance
from osrdyne.testing.driver_harness import AMQP_URI, is_ready, make_spec
from osrdyne.testing.pooled_conformance import PooledConformance, PooledHarness
from osrdyne.testing.pooled_process import DIRECTORY_VARIABLE


class TestKubernetesDriver(BackendConformance, WorkerConformance):
    @pytest.fixture
    async def harness(self, cluster, kubelet, namespace, tmp_path):
        async with harness_for(cluster, kubelet, namespace, tmp_path) as harness:
            yield harness

    @pytest.fixture
    async def driver(self, harness, admin):
        driver = harness.driver()
        yield driver
        await asyncio.to_thread(harness.remove_all, admin)
        await driver.close()

    async def test_worker_gets_its_environment(self, driver):
        """As for other drivers, but each pod is a worker of its own, named after the start and itself."""
        spec = make_spec(note="a 'quoted' $note $(WORKER_POOL)\n漢")
        said = await is_ready(driver, await driver.start(spec))
        assert started_as(said["worker_id"]) == spec.worker_id != said["worker_id"]
        assert (said["key"], said["pool"], said["config"]) == (spec.key, spec.pool, spec.environment.config)
        assert said["uri_sha256"] == hashlib.sha256(AMQP_URI.encode()).hexdigest()


class PooledKubernetesHarness(PooledHarness):
    """Processes are pods, which the played kubelet really runs on this machine."""

    def __init__(self, kubernetes, kubelet, directory):
        super().__init__(directory)
        self.kubernetes = kubernetes
        self.kubelet = kubelet

    def processes(self, pool, *, changed=False):
        variables = {DIRECTORY_VARIABLE: str(self.network.directory)} | ({"CHANGED": "1"} if changed else {})
        return self.kubernetes.make(pool, environment=variables)

    async def kill_process(self, process):
        await self.kubelet.kill_process(process.worker_id)


class TestPooledKubernetesDriver(PooledConformance):
    @pytest.fixture
    async def harness(self, cluster, kubelet, namespace, tmp_path):
        with tempfile.TemporaryDirectory(prefix="osrdyne-") as directory:
            async with harness_for(cluster, kubelet, namespace, tmp_path) as kubernetes:
                pooled = PooledKubernetesHarness(kubernetes, kubelet, Path(directory))
                yield pooled
                await pooled.end()

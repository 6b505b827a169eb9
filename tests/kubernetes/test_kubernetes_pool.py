"""A daemon as its users run it, with the Kubernetes driver: from a request to the Pod object, and then to an answer.

There is no node. The program that a pod names is run here, with the environment and the file that the pod names: so a
request is answered only if the objects say all that a worker needs.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCHEDULER
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod, Secret
from played_kubelet import expand, secret_of, variables_of

from osrdyne.drivers.kubernetes.names import PoolLabels
from osrdyne.drivers.registry import stack_of
from osrdyne.protocol.names import started_as
from tests.acceptance.daemon_process import ROOT, DaemonProcess, own_environment, until

KEYS = ["infra=42,timetable=24", "a b/c$(WORKER_POOL)", "Ünïcode 漢"]
CALL_TIMEOUT = 300.0

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
async def daemon(broker, pool_id, kubelet, namespace, tmp_path):
    options = {"image": "registry.example/worker:1", "scheduler": SCHEDULER, "namespace": namespace}
    driver = {"name": "kubernetes", "options": {**options, "kubeconfig": os.environ["KUBECONFIG"]}}
    at = {"amqp_uri": broker.amqp_uri, "management_uri": broker.management_uri}
    daemon = DaemonProcess(tmp_path, **at, pool=pool_id, settings={"driver": driver})
    try:
        await daemon.start()
        yield daemon
    finally:
        await daemon.close()
    assert "Traceback" not in daemon.log()


class Node:
    """Runs what the pods of one pool name."""

    def __init__(self, admin, namespace, selector, directory):
        self._admin, self._namespace, self._selector = admin, namespace, selector
        self._directory = directory
        self.processes = {}

    def objects(self, kind):
        labels = dict([self._selector.split("=")])
        return list(self._admin.list(kind, namespace=self._namespace, labels=labels))

    async def run(self, count):
        """Wait for so many pods, and run each."""
        pods = await until(lambda: len(found := self.objects(Pod)) == count and found, f"there are {count} pods")
        for pod in pods:
            self.processes[pod.metadata.name] = await self._run(pod)

    async def _run(self, pod):
        home = self._directory / pod.metadata.name
        home.mkdir()
        secret = await until(lambda: self._secret(secret_of(pod)), "the pod's Secret is there")
        variables = variables_of(pod, secret)
        variables["WORKER_READY_FILE"] = str(home / "ready")
        program, *arguments = (expand(part, variables) for part in pod.spec.containers[0].command)
        with (home / "log").open("wb") as log:
            return subprocess.Popen(
                [Path(sys.executable).with_name(program), *arguments],
                cwd=home, env=own_environment(PYTHONPATH=str(ROOT), **variables), stdout=log, stderr=log,
            )  # fmt: skip

    def _secret(self, name):
        return next((item for item in self.objects(Secret) if item.metadata.name == name), None)

    def end_those_without_a_pod(self):
        """As a node does, when their pods are gone."""
        names = {pod.metadata.name for pod in self.objects(Pod)}
        for name in self.processes.keys() - names:
            process = self.processes.pop(name)
            process.terminate()
            process.wait(120)
        return not self.processes

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait(120)


@pytest.fixture
def node(admin, namespace, daemon, tmp_path):
    selector = PoolLabels(stack_of(daemon.amqp_uri), daemon.pool).selector
    node = Node(admin, namespace, selector, tmp_path)
    yield node
    node.close()


async def ask(client, key):
    return await client.call(key, "/echo", key.encode(), timeout=CALL_TIMEOUT)


async def test_requests_make_pods_that_answer_outlive_the_daemon_and_stop_on_request(daemon, node):
    async with daemon.client() as client:
        asked = [asyncio.ensure_future(ask(client, key)) for key in KEYS]
        await node.run(len(KEYS))
        answers = await asyncio.gather(*asked)
        pods = {pod.metadata.labels["osrdyne.dev/worker"]: pod.metadata.uid for pod in node.objects(Pod)}
        assert [answer.body for answer in answers] == [key.encode() for key in KEYS]
        assert {started_as(answer.worker_id) for answer in answers} == pods.keys()

        await daemon.restart()
        again = await asyncio.gather(*(ask(client, key) for key in KEYS))
        assert [answer.worker_id for answer in again] == [answer.worker_id for answer in answers]
        assert {pod.metadata.uid for pod in node.objects(Pod)} == set(pods.values())

    for key in KEYS:
        assert daemon.osrdyne("groups", "stop", key).returncode == 0
    await until(node.end_those_without_a_pod, "the pods are gone")
    await until(lambda: not (node.objects(Deployment) + node.objects(Secret)), "nothing is left of the groups")

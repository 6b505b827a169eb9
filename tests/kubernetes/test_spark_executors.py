"""Workers whose Spark asks Kubernetes for executors (client mode), on a real API server.

No node runs the pods: in one test they stay Pending, in the other the test runs the command of each pod as a process.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from harness import own_namespace
from helm_templates import Chart
from lightkube import ApiError
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.kubernetes.manifests import Manifests
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.testing.driver_harness import make_spec
from tests.acceptance.daemon_process import free_port, until

PATIENCE = 300.0
IMAGE = "registry.example/worker:1"
EXECUTOR = Path(sys.executable).with_name("osrdyne-spark-executor")
SESSION = """
import json, sys
from osrdyne.errors import StartFailedError
from osrdyne.protocol.names import Key
from osrdyne_worker import Context
from osrdyne_worker.spark.session import SparkSessions

sessions = SparkSessions()
try:
    session = sessions.build(Context(key=Key("k"), worker_config={"spark": json.loads(sys.argv[1])}))
except StartFailedError as error:
    print("failed:", error.message)
else:
    print("sum:", session.range(0, 1000, 1, 2).groupBy().sum("id").collect()[0][0])
    sessions.close(session)
"""


@pytest.fixture
def namespace(admin):
    """One without the played kubelet, which would play the pods of these tests as workers."""
    with own_namespace(admin) as name:
        yield name


@pytest.fixture
def driver_pod(admin, namespace):
    """The pod of a worker, which owns the executors."""
    name = f"worker-{secrets.token_hex(4)}"
    spec = PodSpec(containers=[Container(name="worker", image=IMAGE)], schedulerName="played-by-the-tests")
    pod = admin.create(Pod(metadata=ObjectMeta(name=name, namespace=namespace), spec=spec))
    yield pod
    try:
        admin.delete(Pod, name, namespace=namespace, grace_period=0)
    except ApiError as error:
        assert error.status.code == 404


@pytest.fixture
def start_session(cluster, namespace, driver_pod, tmp_path):
    """Starts the session of a worker in a process, as in the pod `driver_pod`."""
    processes = []

    def start(start_timeout):
        ports = {name: str(free_port()) for name in ("spark.driver.port", "spark.driver.blockManager.port")}
        conf = {"spark.driver.memory": "512m", "spark.executor.memory": "512m", **ports}
        limits = {"cores": 1, "start_timeout": start_timeout}
        settings = {"master": f"k8s://{cluster.cluster.server}", **limits, "conf": conf}
        pod = {"OSRDYNE_POD": driver_pod.metadata.name, "OSRDYNE_POD_IP": "127.0.0.1", "OSRDYNE_NAMESPACE": namespace}
        variables = {**os.environ, **pod, "OSRDYNE_IMAGE": IMAGE, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", SESSION, json.dumps(settings)]
        with (tmp_path / "session.log").open("wb") as log:
            process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=log)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def executors(admin, namespace, driver_pod):
    """Lists the pods of executors that `driver_pod` owns."""

    def look():
        pods, uid = admin.list(Pod, namespace=namespace, labels={"spark-role": "executor"}), driver_pod.metadata.uid
        return [pod for pod in pods if uid in [owner.uid for owner in pod.metadata.ownerReferences or []]]

    return look


@pytest.mark.timeout(900)
@pytest.mark.proves("spark/executors-kubernetes-stay-pending")
async def test_executors_that_stay_pending_end_the_start_with_the_reason(start_session):
    process = start_session(start_timeout=40)
    output, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE)
    assert output.decode().startswith("failed: The Spark cluster at k8s://")
    assert "has started no executor within" in output.decode()
    assert "see the events of the executor pods: image, quota, free nodes" in output.decode()


@pytest.mark.timeout(900)
async def test_executors_of_kubernetes_run_the_tasks(admin, namespace, driver_pod, start_session, executors, tmp_path):
    process = start_session(start_timeout=600)
    await until(executors, "Spark asks for an executor", timeout=PATIENCE)
    [pod] = executors()
    [container] = pod.spec.containers
    assert (container.image, container.command) == (IMAGE, ["osrdyne-spark-executor"])
    assert pod.metadata.labels["app.kubernetes.io/name"] == "osrdyne-executor"
    assert pod.spec.securityContext.runAsNonRoot
    assert not container.securityContext.allowPrivilegeEscalation
    # What a kubelet does: it runs the command of the pod with its variables, among them fields of the pod.
    own = {"status.podIP": "127.0.0.1", "metadata.name": pod.metadata.name}
    variables = {
        variable.name: own[variable.valueFrom.fieldRef.fieldPath] if variable.valueFrom else variable.value
        for variable in container.env
    }
    with (tmp_path / "executor.log").open("wb") as log:
        command = [str(EXECUTOR), *container.args]
        executor = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
    try:
        output, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE)
    finally:
        executor.kill()
        executor.wait()
    assert output.decode() == "sum: 499500\n"
    # Executors go with the pod of the worker, however it ends.
    admin.delete(Pod, driver_pod.metadata.name, namespace=namespace, grace_period=0)
    await until(lambda: not executors(), "Kubernetes deletes the executors", timeout=PATIENCE)


def test_pod_of_a_worker_says_what_spark_needs_to_ask_for_executors(namespace):
    worker = {"worker_command": ("osrdyne-worker", "example:app"), "worker_app": "example:app"}
    config = {"spark": {"master": "k8s://https://kubernetes.default.svc", "conf": {}}}
    context = DriverContext(pool="p", stack="s:5672//", clock=SystemClock(), **worker, worker_config=config)
    options = KubernetesOptions(image=IMAGE, namespace=namespace, service_account="blue-spark")
    manifests = Manifests(options, context, spec_hash="hash")
    [container] = manifests.deployment(make_spec())["spec"]["template"]["spec"]["containers"]
    variables = {item["name"]: item for item in container["env"]}
    assert variables["OSRDYNE_POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert variables["OSRDYNE_NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    assert variables["OSRDYNE_IMAGE"]["value"] == IMAGE


def test_chart_gives_workers_the_rights_to_create_executors_only_if_asked():
    chart = Chart(Path(__file__).parents[2] / "deploy" / "kubernetes" / "osrdyne")
    plain = chart.render(release="blue", namespace="default")
    assert not [item for item in plain if item["metadata"]["name"] == "blue-spark"]
    objects = chart.render(release="blue", namespace="default", sparkExecutors={"enabled": True})
    mine = {item["kind"]: item for item in objects if item["metadata"]["name"] == "blue-spark"}
    assert set(mine) == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"}
    assert {item["metadata"]["namespace"] for item in mine.values()} == {"blue-workers"}
    assert not any("secrets" in rule["resources"] for rule in mine["Role"]["rules"])

"""The command of an executor pod, made of the variables that Spark gives the pod."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osrdyne_worker.spark.cluster import kubernetes_defaults
from osrdyne_worker.spark.executor import BACKEND, java_command

VARIABLES = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.7:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "1",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.8",
    "SPARK_EXECUTOR_POD_NAME": "exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    **{f"SPARK_JAVA_OPT_{number}": f"-Doption={number}" for number in (10, 2, 0)},
}
POD = {"OSRDYNE_POD": "w", "OSRDYNE_POD_IP": "10.0.0.7", "OSRDYNE_NAMESPACE": "blue", "OSRDYNE_IMAGE": "worker:1"}


def test_executor_gets_what_spark_has_written_into_its_pod() -> None:
    command = java_command(VARIABLES, java="/java", jars=Path("/jars"))
    assert command[:4] == ["/java", "-Doption=0", "-Doption=2", "-Doption=10"]
    assert command[4:8] == ["-Xms1024m", "-Xmx1024m", "-cp", "/jars/*"]
    assert command[8] == BACKEND
    arguments = dict(zip(command[9::2], command[10::2], strict=True))
    assert arguments["--driver-url"] == VARIABLES["SPARK_DRIVER_URL"]
    assert (arguments["--podName"], arguments["--hostname"]) == ("exec-3", "10.0.0.8")
    with pytest.raises(KeyError, match="SPARK_DRIVER_URL"):
        java_command({"SPARK_EXECUTOR_MEMORY": "1g"}, java="/java", jars=Path("/jars"))


def test_worker_in_a_pod_owns_its_executors(tmp_path: Path) -> None:
    assert kubernetes_defaults({"OSRDYNE_POD": "w"}, tmp_path) == {}, "outside a pod"
    assert kubernetes_defaults(POD | {"OSRDYNE_POD_IP": "fd00::7"}, tmp_path)["spark.driver.host"] == "[fd00::7]"
    conf = kubernetes_defaults(POD, tmp_path)
    assert conf["spark.kubernetes.driver.pod.name"] == "w"
    assert conf["spark.kubernetes.namespace"] == "blue"
    assert conf["spark.kubernetes.container.image"] == "worker:1"
    assert conf["spark.driver.host"] == "10.0.0.7"
    template = json.loads(Path(conf["spark.kubernetes.executor.podTemplateFile"]).read_text())
    [container] = template["spec"]["containers"]
    assert container["name"] == conf["spark.kubernetes.executor.podTemplateContainerName"]
    assert container["command"] == ["osrdyne-spark-executor"]

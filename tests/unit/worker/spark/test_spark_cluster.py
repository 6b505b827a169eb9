"""What a worker takes of a cluster, and when it gives up waiting for executors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError, StartFailedError
from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker.spark.cluster import (
    ClusterLimits,
    StarvationWatch,
    cluster_defaults,
    kubernetes_defaults,
    probe,
    read_master,
    refused_pods,
)
from osrdyne_worker.spark.key_scheduling import master_of_keys
from osrdyne_worker.spark.session import session_conf

STANDALONE = parse_spark_master("spark://master:7077")
LIMITS = ClusterLimits(cores=3, start_timeout=100.0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("spark://master:7077", "spark.cores.max"),
        *((text, "spark.dynamicAllocation.maxExecutors") for text in ("k8s://https://api:6443", "yarn")),
    ],
)
def test_worker_takes_a_share_of_a_cluster_and_nothing_while_idle(text, name):
    master = parse_spark_master(text)
    defaults = cluster_defaults(master, LIMITS)
    assert (defaults[name], defaults["spark.dynamicAllocation.minExecutors"]) == ("3", "0")
    assert session_conf(master, {**defaults, name: "16"}, {})[name] == "16"
    for own in ("local[2]", "local-cluster[1,1,512]", "sc://server"):
        assert cluster_defaults(parse_spark_master(own), LIMITS) == {}


def test_cores_of_a_local_master_only_are_divided_among_keys():
    divided = {"local": "local[1, keys]", "local[*]": "local[*, keys]", "local[2,3]": "local[2,3, keys]"}
    for master in (*divided, "local-cluster[1,2,512]", "spark://host:7077"):
        parsed = parse_spark_master(master)
        assert master_of_keys(parsed) == replace(parsed, text=divided.get(master, master))


def test_settings_of_the_daemon_reach_the_worker_and_kubernetes_needs_an_image():
    worker = {"spark_master": "spark://m:7077", "cores": 7}
    settings = Settings.model_validate({"worker": worker, "lifecycle": {"start_timeout": "2m"}})
    spark = settings.worker_config()["spark"]
    assert isinstance(spark, dict)
    assert ClusterLimits.of(spark) == ClusterLimits(cores=7, start_timeout=120.0)
    # Another configuration of a local worker would be another hash, and an upgrade would replace all workers.
    assert Settings().worker_config()["spark"] == {"master": "local[*]", "conf": {}}
    kubernetes = {"spark_master": "k8s://https://api:6443"}
    with pytest.raises(ValueError, match=r"spark\.kubernetes\.container\.image in worker\.spark_conf"):
        Settings.model_validate({"worker": kubernetes})
    Settings.model_validate({"worker": {**kubernetes, "spark_conf": {"spark.kubernetes.container.image": "spark:4"}}})
    Settings.model_validate({"worker": kubernetes, "driver": {"name": "kubernetes"}})


@pytest.mark.parametrize("settings", [{"cores": 0}, {"cores": True}, {"cores": "4"}, {"start_timeout": 0}])
def test_invalid_limits_are_named(settings):
    with pytest.raises(ConfigurationError, match=rf"WORKER_CONFIG\.spark\.{next(iter(settings))}"):
        ClusterLimits.of(settings)
    with pytest.raises(ConfigurationError, match=r"worker\.spark_master: 'spork://x'"):
        read_master({"spark": {"master": "spork://x"}})


@pytest.mark.proves("spark/master-restarted-forgotten-application")
def test_jobs_without_executors_for_the_limit_end_the_session():
    now = 0.0
    watch = StarvationWatch(STANDALONE, limit=100.0, monotonic=lambda: now)
    # At 90 an executor came, and the wait begins anew; at 150 no job waits.
    for now, jobs, executors in ((0.0, 1, 0), (90.0, 1, 1), (95.0, 2, 0), (150.0, 0, 0), (160.0, 1, 0), (260.0, 1, 0)):
        assert watch.note(jobs=jobs, executors=executors) is (now == 260.0)
    assert "spark://master:7077" in (watch.reason or "")


REFUSED = (
    "io.fabric8.kubernetes.client.KubernetesClientException: Failure executing: POST at: "
    "https://10.0.0.1/api/v1/namespaces/blue/pods. Message: {}. Received status: Status(apiVersion=v1)."
)


def test_refusal_of_executor_pods_is_found_in_the_output_of_spark_and_named_by_the_start():
    message = 'pods "osrdyne-blue-exec-1" is forbidden: exceeded quota: compute, requested: pods=1, used: pods=3'
    lines = ["26/11/22 20:00:00 WARN Store: Exception.", *map(REFUSED.format, ("an earlier one", message)), "\tat io."]
    assert refused_pods(lines) == message
    assert refused_pods(lines[:1]) is None

    class StoppedSession:
        @property
        def sparkContext(self) -> None:
            raise RuntimeError("Job 0 cancelled because SparkContext was shut down")

    master = parse_spark_master("k8s://https://10.0.0.1")
    for output, reason in ((lines, "exceeded quota"), ([], "SparkContext was shut down")):
        with pytest.raises(StartFailedError, match=reason):
            probe(StoppedSession(), master, timeout=60, recent_output=lambda output=output: output)


POD = {"OSRDYNE_POD": "w", "OSRDYNE_POD_IP": "10.0.0.7", "OSRDYNE_NAMESPACE": "blue", "OSRDYNE_IMAGE": "worker:1"}


def test_worker_in_a_pod_owns_its_executors(tmp_path):
    assert kubernetes_defaults({"OSRDYNE_POD": "w"}, tmp_path) == {}, "outside a pod"
    assert kubernetes_defaults(POD | {"OSRDYNE_POD_IP": "fd00::7"}, tmp_path)["spark.driver.host"] == "[fd00::7]"
    conf = kubernetes_defaults(POD, tmp_path)
    names = ("driver.pod.name", "namespace", "container.image")
    assert [conf[f"spark.kubernetes.{name}"] for name in names] == ["w", "blue", "worker:1"]
    assert conf["spark.driver.host"] == "10.0.0.7"
    template = json.loads(Path(conf["spark.kubernetes.executor.podTemplateFile"]).read_text())
    [container] = template["spec"]["containers"]
    assert container["name"] == conf["spark.kubernetes.executor.podTemplateContainerName"]
    assert container["command"] == ["osrdyne-spark-executor"]

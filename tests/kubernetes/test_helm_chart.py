"""The Helm chart: rendered, checked by a real API server, and its Role against every call of the driver."""

import secrets
from itertools import product, starmap
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from harness import harness_for, kubeconfig_with
from helm_templates import Chart
from kubernetes_validate.utils import all_versions
from lightkube import codecs
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ServiceAccount, ServiceAccountToken

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import Settings
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.kubernetes import KubernetesDriver
from osrdyne.drivers.kubernetes.check import PROCESS_RIGHTS, RIGHTS, SCALING_RIGHTS, Right
from osrdyne.drivers.kubernetes.names import PoolLabels
from osrdyne.drivers.kubernetes.options import Scaling
from osrdyne.drivers.registry import create_driver
from osrdyne.errors import DriverUnavailableError, StartFailedError
from osrdyne.testing.driver_harness import clean_up, is_ready, make_spec
from tests.acceptance.daemon_process import merged

CHART = Chart(Path(__file__).parents[2] / "deploy" / "kubernetes" / "osrdyne")
EXAMPLE = Path(__file__).parents[2] / "deploy" / "config" / "kubernetes.yaml"
OLDEST, *_ = KUBERNETES = list(dict.fromkeys(all_versions()))
EVERYTHING = {
    "imagePullSecrets": [{"name": "registry"}],
    "rbac": {"hpa": True, "keda": True},
    "serviceAccount": {"name": "another", "annotations": {"note": "one"}},
    "podAnnotations": {"note": "another"},
    "podLabels": {"team": "data"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "spark", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "networkPolicy": {"apiFrom": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]},
    "sparkExecutors": {"enabled": True},
    "config": {"telemetry": {"name": "sensors", "last_values": {"store": "postgresql", "uri_file": "/run/uri"}}},
    "lastValueReader": {"enabled": True, "uriSecret": "reader"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}


def rendered(namespace="default", **values):
    return CHART.render(release="blue", namespace=namespace, **values)


def the(kind, objects, name=None):
    [found] = [item for item in objects if item["kind"] == kind and name in {None, item["metadata"]["name"]}]
    return found


def pod_of(objects, name="blue"):
    """The pod of a Deployment, and the directories of its container's volumes."""
    pod = the("Deployment", objects, name)["spec"]["template"]["spec"]
    return pod, {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}


def configuration_of(objects):
    return yaml.safe_load(the("ConfigMap", objects)["data"]["osrdyne.yaml"])


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_api_server_accepts_every_object(admin, namespace, values):
    for item in rendered(namespace, **values, workerNamespace={"name": namespace}):
        if item["kind"] != "PodMonitor":  # of the Prometheus operator, which is not there
            applied = admin.apply(codecs.from_dict(item), field_manager="chart-test", dry_run=True)
            assert applied.metadata.name


@pytest.mark.parametrize("version", [OLDEST, *KUBERNETES[-4:]])
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_values_pass_their_schema_and_kubernetes_accepts_the_objects(values, version):
    jsonschema.validate(merged(CHART.values, values), CHART.schema)
    for item in rendered(**values):
        if item["kind"] != "PodMonitor":
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"config": {"driver": {"name": "docker"}}},
        {"rbac": {"KEDA": True}},
        {"brokerSecret": ""},
        {"config": {"driver": {"options": {"namespace": "here"}}}},
        {"lastValueReader": {"enabled": True}},
        {"lastValueReader": {"enabled": True}, "config": {"telemetry": {"last_values": {"store": "sqlite"}}}},
    ],
    ids=str,
)
def test_value_that_means_nothing_is_refused(values):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(CHART.values, values), CHART.schema)


async def test_example_configuration_is_one_that_chart_daemon_and_driver_take():
    example = yaml.safe_load(EXAMPLE.read_text())
    jsonschema.validate(merged(CHART.values, {"config": example}), CHART.schema)
    settings = Settings.model_validate(configuration_of(rendered(config=example)) | {"broker": {}})
    context = DriverContext(pool="p", stack="s", clock=SystemClock(), worker_command=("w", "a:b"))
    assert isinstance(create_driver(settings.driver, context), KubernetesDriver)


def test_changed_configuration_rolls_the_daemon():
    daemons = [the("Deployment", rendered(config={"pool": {"id": pool}}), "blue") for pool in ("a", "b")]
    before, after = (daemon["spec"]["template"]["metadata"]["annotations"] for daemon in daemons)
    assert before["checksum/config"] != after["checksum/config"]


def test_api_has_tokens_a_socket_for_commands_in_the_pod_and_a_port_for_probes():
    objects = rendered(**EVERYTHING)
    api = configuration_of(objects)["api"]
    pod, mounts = pod_of(objects)
    [secret] = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "api-tokens"]
    assert (secret["secretName"], f"{mounts['api-tokens']}/tokens.json") == ("osrdyne-api-tokens", api["tokens_file"])
    assert api["socket"].startswith(f"{mounts['socket']}/")
    assert api["allowed_hosts"]
    [endpoint] = the("PodMonitor", objects)["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "osrdyne-metrics-token", "key": "token"}
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {"probes"}
    # The variable of the image comes before the file.
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert ports["probes"] == api["probe_port"] == int(environment["OSRDYNE__API__PROBE_PORT"]) != ports["api"]


def test_last_value_reader_has_the_configuration_of_the_daemon_and_a_uri_of_its_own():
    objects = rendered(**EVERYTHING)
    reader, daemon = the("Deployment", objects, "blue-last-value"), the("Deployment", objects, "blue")
    pod, mounts = pod_of(objects, "blue-last-value")
    [container] = pod["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    [secret] = [volume["secret"]["secretName"] for volume in pod["volumes"] if volume["name"] == "last-value"]
    assert container["args"] == ["last-value"]
    assert environment["OSRDYNE_CONFIG"] == f"{mounts['config']}/osrdyne.yaml"
    assert secret == "reader"
    assert environment["OSRDYNE__TELEMETRY__LAST_VALUES__URI_FILE"] == f"{mounts['last-value']}/uri"
    assert "api-tokens" not in mounts
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == pod_of(objects)[0]["containers"][0]["securityContext"]
    # Neither the daemon's Deployment nor its NetworkPolicy selects the pod.
    labels = reader["spec"]["template"]["metadata"]["labels"]
    assert not daemon["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy = the("NetworkPolicy", objects, "blue-last-value")["spec"]
    assert (policy["podSelector"], policy["ingress"]) == (reader["spec"]["selector"], [])


def test_only_named_peers_reach_the_api():
    assert the("NetworkPolicy", rendered(), "blue")["spec"]["ingress"] == []
    [rule] = the("NetworkPolicy", rendered(**EVERYTHING), "blue")["spec"]["ingress"]
    assert rule["ports"] == [{"port": 4242, "protocol": "TCP"}]


def rights_in(role):
    for rule in role["rules"]:
        yield from starmap(Right, product(rule["apiGroups"], rule["resources"], rule["verbs"]))


@pytest.mark.parametrize("mode", list(Scaling))
@pytest.mark.parametrize("pooled", [False, True])
def test_role_grants_what_the_driver_uses_and_no_more(mode, pooled):
    rbac = {"hpa": mode is Scaling.HPA, "keda": mode is Scaling.KEDA, "pooled": pooled}
    granted = set(rights_in(the("Role", rendered(rbac=rbac))))
    assert granted == {*RIGHTS, *SCALING_RIGHTS[mode], *(PROCESS_RIGHTS if pooled else ())}


def test_workers_live_in_a_namespace_of_their_own_and_the_daemon_has_rights_there_only():
    objects = rendered("daemons")
    assert the("Namespace", objects)["metadata"]["name"] == "blue-workers"
    assert {the(kind, objects)["metadata"]["namespace"] for kind in ("Role", "RoleBinding")} == {"blue-workers"}
    assert the("RoleBinding", objects)["subjects"][0]["namespace"] == "daemons"
    [container] = pod_of(objects)[0]["containers"]
    assert {"name": "OSRDYNE__DRIVER__OPTIONS__NAMESPACE", "value": "blue-workers"} in container["env"]
    assert not [item for item in objects if item["kind"].startswith("Cluster")]


def test_workers_reach_the_broker_and_names_and_nothing_else():
    policy = the("NetworkPolicy", rendered("daemons"), "blue-workers")
    assert policy["metadata"]["namespace"] == "blue-workers"
    labels = PoolLabels("s", "p").labels(make_spec())
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"] == []
    reached = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert reached == {53, 5671, 5672}
    assert all(rule["to"] and not any("ipBlock" in peer for peer in rule["to"]) for rule in policy["spec"]["egress"])
    store = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}
    more = the("NetworkPolicy", rendered(workerNetworkPolicy={"egress": [store]}), "blue-workers")
    assert more["spec"]["egress"][-1] == store


class Account:
    """A service account of a release in the namespace `default`, whose workers live in the namespace of the tests."""

    def __init__(self, admin, namespace):
        self.admin = admin
        self.namespace = namespace
        self.release = f"r{secrets.token_hex(4)}"
        values = {"rbac": {"hpa": True}, "workerNamespace": {"name": namespace, "create": False}}
        self.objects = CHART.render(release=self.release, namespace="default", **values)
        for kind in ("ServiceAccount", "Role", "RoleBinding"):
            admin.apply(codecs.from_dict(the(kind, self.objects)), field_manager="chart-test")

    def token(self):
        request = ServiceAccountToken(metadata=ObjectMeta(), spec=TokenRequestSpec(audiences=[]))
        return self.admin.create(request, self.release, namespace="default").status.token

    def without(self, right):
        """Take one right away."""
        role = the("Role", self.objects)
        left = [one for one in rights_in(role) if one != right]
        rules = [{"apiGroups": [one.group], "resources": [one.resource], "verbs": [one.verb]} for one in left]
        self.admin.apply(codecs.from_dict(role | {"rules": rules}), field_manager="chart-test", force=True)


@pytest.fixture
def account(admin, namespace):
    account = Account(admin, namespace)
    yield account
    admin.delete(ServiceAccount, account.release, namespace="default")


@pytest.fixture
async def harness(cluster, kubelet, namespace, tmp_path, account):
    async with harness_for(cluster, kubelet, namespace, tmp_path) as harness:
        server = yaml.safe_load(harness.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        harness.kubeconfig.write_text(kubeconfig_with(cluster, server, token=account.token()))
        yield harness


@pytest.mark.parametrize("mode", ["none", "hpa"])
async def test_rights_of_the_chart_are_enough_for_a_whole_life(harness, mode):
    driver = harness.make(autoscaling={"mode": mode}, resources={"requests": {"cpu": "1"}})
    assert [finding for finding in await driver.check() if not finding.ok] == []
    started = await driver.start(make_spec())
    await is_ready(driver, started)
    await anext(driver.events())
    assert [instance.instance_id for instance in await driver.list_instances()] == [started.instance_id]
    await clean_up(driver)


async def test_rights_of_the_chart_do_not_reach_the_namespace_of_the_release(harness):
    """Who may create a Deployment can mount every Secret of its namespace."""
    driver = harness.make(namespace="default")
    [finding] = [finding for finding in await driver.check() if not finding.ok]
    assert all(str(right) in finding.message for right in RIGHTS)
    with pytest.raises(StartFailedError):
        await driver.start(make_spec())
    await driver.close()


@pytest.mark.parametrize("right", RIGHTS, ids=str)
@pytest.mark.proves("kubernetes/daemon-lacks-right-keda")
async def test_missing_right_is_named_by_the_doctor(harness, account, right):
    account.without(right)
    driver = harness.make()
    [finding] = [finding for finding in await driver.check() if not finding.ok]
    assert str(right) in finding.message
    assert "Helm chart" in finding.remedy
    await driver.close()


@pytest.mark.parametrize("right", [Right("apps", "deployments", "create"), Right("", "secrets", "patch")], ids=str)
@pytest.mark.proves("kubernetes/daemon-lacks-right-keda")
async def test_start_without_a_right_fails_and_names_it(harness, account, right):
    account.without(right)
    driver = harness.make()
    with pytest.raises(StartFailedError, match=rf"{right.verb}.* on {right.resource}"):
        await driver.start(make_spec())
    await driver.close()


async def test_listing_without_a_right_is_tried_again_and_names_it(harness, account):
    account.without(Right("", "pods", "list"))
    driver = harness.make()
    with pytest.raises(DriverUnavailableError, match='cannot list resource "pods"'):
        await driver.list_instances()
    await driver.close()

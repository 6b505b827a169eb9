"""The documents the Kubernetes driver makes, against the schemas that Kubernetes and KEDA publish.

`kubernetes-validate` has those of Kubernetes, made from the API definition of each version. Strict: a field that a
version does not know is an error. The chart's objects are held to the same in `tests/kubernetes`.
"""

import json
from dataclasses import replace

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate.utils import all_versions
from pydantic import ValidationError

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.kubernetes.manifests import Manifests
from osrdyne.drivers.kubernetes.names import SPEC_ANNOTATION, PoolLabels
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.protocol.environment import Placement
from osrdyne.protocol.names import Key
from osrdyne.testing.driver_harness import AMQP_URI, SECRET, make_spec
from osrdyne.testing.keys import ODD_KEYS

CONTEXT = DriverContext(
    pool="_odd_",
    stack="broker.example:5672//",
    clock=SystemClock(),
    worker_command=("/daemon/bin/osrdyne-worker", "example.module:app"),
    worker_app="example.module:app",
    worker_config={"runtime": {"stop_grace": 42.5}},
)
EVERYTHING = {
    "image": "registry.example/worker:1",
    "command": ["run", "$HOME"],
    "image_pull_policy": "Always",
    "image_pull_secrets": ["registry"],
    "environment": {"AWS_REGION": "eu-west-3", "PRICE": "$(5)"},
    "environment_from": ["aws"],
    "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
    "node_selector": {"disk": "fast"},
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "tolerations": [{"key": "spark", "operator": "Exists"}],
    "priority_class": "high",
    "scheduler": "another",
    "service_account": "workers",
    "run_as_user": 1000,
    "labels": {"team": "data"},
    "annotations": {"note": "of ours"},
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}}],
    "volume_mounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    "scratch_size": "10GiB",
    "replicas": 3,
}
OLDEST, *_ = KUBERNETES = list(dict.fromkeys(all_versions()))
CURRENT = [OLDEST, *KUBERNETES[-4:]]
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def fields(*, required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def each(schema):
    return {"type": "array", "items": schema}


# What KEDA 2.21 publishes in its custom resource definitions, of the fields that are used here.
SCALED_OBJECT = fields(
    required=("scaleTargetRef", "triggers"),
    scaleTargetRef=fields(required=("name",), name=TEXT, kind=TEXT, apiVersion=TEXT),
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    pollingInterval=NUMBER,
    advanced=fields(
        horizontalPodAutoscalerConfig=fields(behavior=fields(scaleDown=fields(stabilizationWindowSeconds=NUMBER)))
    ),
    triggers=each(
        fields(
            required=("metadata", "type"),
            type=TEXT,
            metadata={"type": "object", "additionalProperties": TEXT},
            authenticationRef=fields(required=("name",), name=TEXT),
        )
    ),
)
TRIGGER_AUTHENTICATION = fields(
    secretTargetRef=each(fields(required=("key", "name", "parameter"), key=TEXT, name=TEXT, parameter=TEXT))
)
SCALING = {"mode": "keda", "max_replicas": 9, "keda": {"secret": "for-keda", "messages_per_worker": 4}}


def manifests(**options):
    return Manifests(KubernetesOptions(**({"image": "i:1"} | options)), CONTEXT, spec_hash="0123456789abcdef")


def pod_of(manifest):
    return manifest["spec"]["template"]["spec"]


def variables_of(pod):
    return {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}


def process_spec():
    spec = make_spec()
    return replace(spec, environment=replace(spec.environment, placement=Placement.POOLED, requests_queues=()))


@pytest.mark.parametrize("version", CURRENT)
def test_kubernetes_accepts_the_objects_of_groups_processes_and_autoscalers(version):
    assert {"1.34.0", "1.35.0", "1.36.0", "1.37.0"} <= set(CURRENT), "those that clusters run"
    group, process = make_spec(), process_spec()
    documents = []
    for options in ({}, EVERYTHING):
        made = manifests(**options)
        documents += [made.deployment(group), made.deployment(group, uid="uid"), made.secret(group, owner="uid")]
        documents += [made.process(process), made.secret(process, owner="uid")]
    made = manifests(autoscaling={"mode": "hpa"})
    for served in ("v1", "v2", "v2beta2") if version == OLDEST else ("v1", "v2"):
        documents.append(made.autoscaler(group, owner="uid", version=served))
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.proves("kubernetes/pod-pooled-process-ends")
def test_process_is_one_pod_that_is_never_started_again_and_has_the_id_of_its_start():
    spec = process_spec()
    document = manifests().process(spec)
    assert (document["kind"], document["spec"]["restartPolicy"]) == ("Pod", "Never")
    variables = variables_of(document["spec"])
    assert (variables["WORKER_ID"], variables["WORKER_PLACEMENT"]) == (spec.worker_id, "pooled")
    [owner] = manifests().secret(spec, owner="uid")["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Pod", document["metadata"]["name"])
    profiled = manifests().process(replace(spec, spec_hash="of a profile"))
    hashes = [one["metadata"]["annotations"][SPEC_ANNOTATION] for one in (document, profiled)]
    assert hashes == ["0123456789abcdef", "of a profile"]


@pytest.mark.proves("circuits/group-open-circuit-worker")
def test_paused_start_is_in_the_pods_of_the_group_and_does_not_count_as_other_settings():
    spec = make_spec()
    paused = replace(spec, environment=replace(spec.environment, paused=True))
    before, after = manifests().deployment(spec), manifests().deployment(paused)
    variables = [variables_of(pod_of(one)) for one in (before, after)]
    assert variables == [variables[0], variables[0] | {"WORKER_PAUSED": "1"}]
    annotations = [one["metadata"]["annotations"][SPEC_ANNOTATION] for one in (before, after)]
    assert annotations == [annotations[0]] * 2


def test_number_of_pods_is_in_no_document_of_the_group():
    for scaling in ({"mode": "none"}, {"mode": "hpa"}, SCALING):
        assert "replicas" not in manifests(autoscaling=scaling, replicas=5).deployment(make_spec())["spec"]


def test_objects_of_keda_have_fields_that_it_knows():
    made, spec = manifests(autoscaling=SCALING), make_spec()
    jsonschema.validate(made.scaled_object(spec, owner="uid")["spec"], SCALED_OBJECT)
    jsonschema.validate(made.keda_authentication(spec, owner="uid")["spec"], TRIGGER_AUTHENTICATION)


def test_keda_counts_over_http_with_unacknowledged_messages_and_credentials_of_a_secret():
    made, spec = manifests(autoscaling=SCALING), make_spec(Key("a=b"))
    authentication, scaled = made.keda_authentication(spec, owner="uid"), made.scaled_object(spec, owner="uid")["spec"]
    [trigger] = scaled["triggers"]
    assert trigger["metadata"] == {
        "protocol": "http",
        "queueName": "conformance-req-a+3Db",
        "vhostName": "/",
        "mode": "QueueLength",
        "value": "4",
        "excludeUnacknowledged": "false",
    }
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 9)
    assert authentication["spec"]["secretTargetRef"] == [{"parameter": "host", "name": "for-keda", "key": "host"}]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]


def test_pod_may_do_nothing_it_does_not_need():
    pod = pod_of(manifests().deployment(make_spec()))
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False


def test_password_is_in_the_secret_of_the_deployment_alone():
    made, spec = manifests(autoscaling=SCALING), make_spec()
    [owner] = made.secret(spec, owner="the-uid")["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Deployment", "the-uid")
    others = [
        made.deployment(spec),
        made.replicas_patch(spec, uid="uid"),
        made.keda_authentication(spec, owner="uid"),
        made.scaled_object(spec, owner="uid"),
    ]
    assert SECRET not in json.dumps(others)
    assert AMQP_URI not in repr(made)


def test_pod_has_the_grace_of_its_worker_and_is_ready_when_that_reports_it():
    manifest = manifests().deployment(make_spec())
    assert pod_of(manifest)["terminationGracePeriodSeconds"] == 43
    probe = pod_of(manifest)["containers"][0]["readinessProbe"]
    assert probe["exec"]["command"] == ["test", "-e", variables_of(pod_of(manifest))["WORKER_READY_FILE"]]


def test_text_is_never_expanded():
    manifest = manifests(**EVERYTHING).deployment(make_spec(Key("$(WORKER_POOL)")))
    assert variables_of(pod_of(manifest))["WORKER_KEY"] == "$$(WORKER_POOL)"
    assert variables_of(pod_of(manifest))["PRICE"] == "$$(5)"
    assert pod_of(manifest)["containers"][0]["command"] == ["run", "$$HOME"]


def test_key_that_yaml_would_change_travels_escaped():
    for key in ("a\nb", "a\0b", "a\x7fb", "a\u2028b", "a\u0085b"):
        variables = variables_of(pod_of(manifests().deployment(make_spec(Key(key)))))
        assert ("WORKER_KEY" in variables, variables["WORKER_KEY_ESCAPED"][:2]) == (False, "a+")


def test_names_are_names_for_kubernetes():
    for key in ODD_KEYS.values():
        spec = make_spec(key)
        metadata = manifests().secret(spec, owner="uid")["metadata"]
        assert len(metadata["name"]) <= 63
        assert len(manifests().name(spec)) <= 46
        for text in (metadata["name"], *metadata["labels"].values()):
            assert text.replace("-", "").replace(".", "").isalnum()
            assert text.strip("-.") == text


def test_keys_slots_pools_and_brokers_have_names_of_their_own():
    names = {
        PoolLabels(stack, pool).object_name(Key(key), slot)
        for stack in ("a", "b")
        for pool in ("p", "q")
        for key in ("A", "a", "%41", "")
        for slot in (0, 1)
    }
    assert len(names) == 32


@pytest.mark.parametrize(
    "options",
    [
        {"autoscaling": {"mode": "keda"}},
        {"autoscaling": {"min_replicas": 4, "max_replicas": 3}},
        {"environment": {"WORKER_KEY": "x"}},
        {"environment": {"a-b": "x"}},
        {"labels": {"osrdyne.dev/pool": "x"}},
        {"command": []},
        {"run_as_user": 0},
        {"resources": {"requests": {"memory": "plenty"}}},
    ],
    ids=str,
)
def test_option_that_makes_no_sense_is_refused(options):
    with pytest.raises(ValidationError):
        KubernetesOptions(**({"image": "i:1"} | options))

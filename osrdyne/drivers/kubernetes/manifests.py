"""Builds the Kubernetes objects of one group from the options and the specification of a worker. Pure.

Tests check them against the schemas of current Kubernetes and KEDA. Only the Secret contains a secret. No object except
`replicas_patch` contains `replicas`, because the component that scales the group owns that field.
"""

from __future__ import annotations

import base64
import math
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from osrdyne.drivers.base import DriverContext, WorkerSpec, uses_kubernetes_executors
from osrdyne.drivers.kubernetes.names import (
    GENERATION_ANNOTATION,
    SCALING_ANNOTATION,
    SPEC_ANNOTATION,
    WORKER_LABEL,
    PoolLabels,
    is_process,
    key_annotations,
)
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.protocol.environment import READY_FILE_VARIABLE, URI_VARIABLE
from osrdyne.protocol.names import encode_key, replica_id

Manifest: TypeAlias = dict[str, Any]

CONTAINER = "worker"
URI_KEY = "amqp-uri"
_READY_FILE = "/tmp/osrdyne-ready"  # nosec B108
_READY_EXISTS = ["test", "-e", _READY_FILE]
_DEFAULT_GRACE = 30.0


class Manifests:
    """Builds the objects of the groups of one pool."""

    def __init__(self, options: KubernetesOptions, context: DriverContext, *, spec_hash: str) -> None:
        self._options = options
        self._context = context
        self._labels = PoolLabels.of(context)
        self._spec_hash = spec_hash

    def name(self, spec: WorkerSpec) -> str:
        return self._labels.object_name(spec.key, spec.slot)

    def owned_name(self, spec: WorkerSpec) -> str:
        return self._labels.owned_name(spec)

    def deployment(self, spec: WorkerSpec, *, uid: str | None = None) -> Manifest:
        """The Deployment of a group. With `uid` it can only change the object with this uid, and creates none."""
        metadata: Manifest = {"name": self.name(spec), "labels": self._labels.labels(spec)}
        if uid is not None:
            metadata["uid"] = uid
        metadata["annotations"] = key_annotations(spec) | {
            SPEC_ANNOTATION: spec.spec_hash or self._spec_hash,
            GENERATION_ANNOTATION: str(spec.generation),
            SCALING_ANNOTATION: self._options.autoscaling.mode.value,
        }
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "selector": {"matchLabels": {WORKER_LABEL: spec.worker_id}},
                "revisionHistoryLimit": 1,
                # A new pod is ready before an old one is ended.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": self._pod(spec),
            },
        }

    def process(self, spec: WorkerSpec) -> Manifest:
        """A process of pooled workers: a pod without a Deployment.

        Kubernetes must not start its container again: the new process would have the same worker id, and no record of
        the workers before (lifecycle: pooled-ids-once).
        """
        pod = self._pod(spec)
        metadata = pod["metadata"] | {"name": self.name(spec)}
        metadata["annotations"] |= {
            # The hash of a profile if the process has its settings: the next leader places keys by it.
            SPEC_ANNOTATION: spec.spec_hash or self._spec_hash,
            GENERATION_ANNOTATION: str(spec.generation),
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": pod["spec"] | {"restartPolicy": "Never"},
        }

    def secret(self, spec: WorkerSpec, *, owner: str) -> Manifest:
        """The Secret with the broker URI, to which a variable of the pods refers."""
        uri = base64.b64encode(spec.environment.amqp_uri.encode()).decode()
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._owned(spec, owner),
            "type": "Opaque",
            "data": {URI_KEY: uri},
        }

    def replicas_patch(self, spec: WorkerSpec, *, uid: str) -> Manifest:
        """The number of pods, for groups without an autoscaler."""
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": self.name(spec), "uid": uid},
            "spec": {"replicas": self._options.replicas},
        }

    def autoscaler(self, spec: WorkerSpec, *, owner: str, version: str) -> Manifest:
        """A HorizontalPodAutoscaler on the use of CPU, in `version` of its API (`v2`, `v2beta2` or `v1`)."""
        scaling = self._options.autoscaling
        body: Manifest = {
            "scaleTargetRef": self._target(spec),
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
        }
        if version == "v1":
            body["targetCPUUtilizationPercentage"] = scaling.cpu_utilization
        else:
            target = {"type": "Utilization", "averageUtilization": scaling.cpu_utilization}
            body["metrics"] = [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]
            body["behavior"] = self._behavior()
        return {
            "apiVersion": f"autoscaling/{version}",
            "kind": "HorizontalPodAutoscaler",
            "metadata": self._owned(spec, owner),
            "spec": body,
        }

    def keda_authentication(self, spec: WorkerSpec, *, owner: str) -> Manifest:
        """The reference to the operator's Secret with RabbitMQ's HTTP URI, for KEDA."""
        keda = self._options.autoscaling.keda
        target = {"parameter": "host", "name": keda.secret, "key": keda.secret_key}
        return {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "TriggerAuthentication",
            "metadata": self._owned(spec, owner),
            "spec": {"secretTargetRef": [target]},
        }

    def scaled_object(self, spec: WorkerSpec, *, owner: str) -> Manifest:
        """KEDA's scaling by the length of the request queue. Over HTTP the length includes unacknowledged messages, so
        that running requests keep their workers."""
        scaling = self._options.autoscaling
        trigger = {
            "type": "rabbitmq",
            "metadata": {
                "protocol": "http",
                "queueName": spec.environment.requests_queue,
                "vhostName": _vhost(spec.environment.amqp_uri),
                "mode": "QueueLength",
                "value": str(scaling.keda.messages_per_worker),
                "excludeUnacknowledged": "false",
            },
            "authenticationRef": {"name": self._labels.owned_name(spec)},
        }
        return {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": self._owned(spec, owner),
            "spec": {
                "scaleTargetRef": self._target(spec),
                "minReplicaCount": scaling.min_replicas,
                "maxReplicaCount": scaling.max_replicas,
                "pollingInterval": math.ceil(scaling.keda.polling_interval),
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": self._behavior()}},
                "triggers": [trigger],
            },
        }

    # --- internals

    def _owned(self, spec: WorkerSpec, owner: str) -> Manifest:
        """The metadata of an object that Kubernetes deletes with the Deployment, or with the pod of a process."""
        kind = ("v1", "Pod") if is_process(spec) else ("apps/v1", "Deployment")
        reference = {"apiVersion": kind[0], "kind": kind[1], "name": self.name(spec), "uid": owner}
        return {
            "name": self._labels.owned_name(spec),
            "labels": self._labels.labels(spec),
            "ownerReferences": [reference],
        }

    def _target(self, spec: WorkerSpec) -> Manifest:
        return {"apiVersion": "apps/v1", "kind": "Deployment", "name": self.name(spec)}

    def _behavior(self) -> Manifest:
        seconds = math.ceil(self._options.autoscaling.scale_down_delay)
        return {"scaleDown": {"stabilizationWindowSeconds": seconds}}

    def _pod(self, spec: WorkerSpec) -> Manifest:
        options = self._options
        user = {} if options.run_as_user is None else {"runAsUser": options.run_as_user}
        pod: Manifest = {
            "containers": [self._container(spec)],
            "volumes": self._volumes(),
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **user},
            "automountServiceAccountToken": options.service_account is not None,
            "enableServiceLinks": False,  # they are variables of every Service of the namespace, perhaps WORKER_…
            "terminationGracePeriodSeconds": self._grace(),
            "nodeSelector": options.node_selector,
            "affinity": options.affinity,
            "tolerations": list(options.tolerations),
            "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
            "serviceAccountName": options.service_account,
            "priorityClassName": options.priority_class,
            "schedulerName": options.scheduler,
        }
        return {
            "metadata": {
                "labels": {**options.labels, **self._labels.labels(spec)},
                "annotations": {**options.annotations, **key_annotations(spec)},
            },
            "spec": _without_empty(pod),
        }

    def _container(self, spec: WorkerSpec) -> Manifest:
        options = self._options
        command = options.command or ("osrdyne-worker", self._context.worker_app)
        container: Manifest = {
            "name": CONTAINER,
            "image": options.image,
            "imagePullPolicy": options.image_pull_policy,
            "command": [_literal(part) for part in command],
            "env": self._environment(spec),
            "envFrom": [{"secretRef": {"name": name}} for name in options.environment_from],
            "resources": _without_empty(options.resources.model_dump()),
            "volumeMounts": [
                {"name": "scratch", "mountPath": "/tmp"},  # nosec B108
                *options.volume_mounts,
            ],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "readinessProbe": self._readiness(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        return _without_empty(container)

    def _readiness(self) -> Manifest | None:
        """The readiness probe. A worker of the reference writes no file: its pod is ready once its container runs."""
        if self._context.uri_in_environment:
            return None
        # The first probe is late: a restarted container still has the file of its former run, and deletes it first.
        return {"exec": {"command": _READY_EXISTS}, "initialDelaySeconds": 5, "periodSeconds": 5}

    def _environment(self, spec: WorkerSpec) -> list[Manifest]:
        variables = self._options.environment | spec.environment.to_variables()
        del variables[URI_VARIABLE], variables["WORKER_ID"]
        if not spec.key.isprintable():
            variables.pop("WORKER_KEY", None)
            variables["WORKER_KEY_ESCAPED"] = encode_key(spec.key)
        # Not a mounted file, which the worker could not delete. It deletes this variable before it runs an application.
        uri = {"secretKeyRef": {"name": self._labels.owned_name(spec), "key": URI_KEY}}
        variables[READY_FILE_VARIABLE] = _READY_FILE
        # Each pod of a group is a worker of its own. A process has one pod, and the leader sends messages to its id.
        worker_id = spec.worker_id if is_process(spec) else replica_id(spec.worker_id, "$(OSRDYNE_POD)")
        return [
            {"name": "OSRDYNE_POD", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
            {"name": "WORKER_ID", "value": worker_id},
            {"name": URI_VARIABLE, "valueFrom": uri},
            *self._spark_environment(spec),
            *({"name": name, "value": _literal(value)} for name, value in variables.items()),
        ]

    def _spark_environment(self, spec: WorkerSpec) -> list[Manifest]:
        """The variables that Spark needs to request executors: address, namespace and image of the pod."""
        config = spec.environment.config  # the group may have a profile with another master than the pool
        if not uses_kubernetes_executors(config if "spark" in config else self._context.worker_config):
            return []
        fields = {"OSRDYNE_POD_IP": "status.podIP", "OSRDYNE_NAMESPACE": "metadata.namespace"}
        return [
            *(
                {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
                for name, path in fields.items()
            ),
            {"name": "OSRDYNE_IMAGE", "value": _literal(self._options.image)},
        ]

    def _volumes(self) -> list[Manifest]:
        size = self._options.scratch_size
        scratch: Manifest = {} if size is None else {"sizeLimit": str(size)}
        return [
            {"name": "scratch", "emptyDir": scratch},
            *self._options.volumes,
        ]

    def _grace(self) -> int:
        """The grace period in seconds: `worker.stop_grace` from the configuration of the worker."""
        grace = self._context.stop_grace
        return max(1, math.ceil(_DEFAULT_GRACE if grace is None else grace))


def _literal(text: str) -> str:
    """Escape a text for commands and variables, in which Kubernetes expands `$(NAME)`."""
    return text.replace("$", "$$")


def _without_empty(document: Manifest) -> Manifest:
    """Drop empty fields, which server-side apply would own."""
    return {name: value for name, value in document.items() if value not in (None, {}, [], "")}


def _vhost(amqp_uri: str) -> str:
    return unquote(urlsplit(amqp_uri).path.removeprefix("/")) or "/"

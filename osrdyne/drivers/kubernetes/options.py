"""The options of the Kubernetes driver. Pure: reads no cluster."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from osrdyne.config.models import Model
from osrdyne.config.types import Duration, PublicMapping, PublicTexts, Size
from osrdyne.drivers.base import DriverContext, DriverOptions
from osrdyne.drivers.shared import ShellVariables

_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:[numkMGTPE]|[KMGTPE]i|[eE][-+]?\d+)?\Z")
LABEL_PREFIX = "osrdyne.dev/"


class Scaling(StrEnum):
    """What sets the number of a group's pods: the option `replicas`, a HorizontalPodAutoscaler, or KEDA."""

    NONE = "none"
    HPA = "hpa"
    KEDA = "keda"


class KedaOptions(Model):
    """How KEDA reads the length of a queue: from RabbitMQ's HTTP API, which includes unacknowledged messages."""

    secret: str | None = Field(
        None,
        description="Secret in the workers' namespace with RabbitMQ's HTTP URI; that user needs only `monitoring`.",
    )
    secret_key: str = Field("host", description="Key in that Secret.")
    messages_per_worker: int = Field(1, ge=1, description="Messages in the queue for which one worker is enough.")
    polling_interval: Duration = Field(15.0, ge=1, description="How often KEDA queries RabbitMQ.")


class AutoscalingOptions(Model):
    """How many pods a group has. With `hpa` and `keda` the driver does not set the number."""

    mode: Scaling = Field(Scaling.NONE, description="`none`, `hpa` or `keda`.")
    min_replicas: int = Field(1, ge=1, description="With `hpa` and `keda`; osrdyne itself ends an idle group.")
    max_replicas: int = Field(3, ge=1, description="With `hpa` and `keda`.")
    cpu_utilization: int = Field(80, ge=1, le=1000, description="With `hpa`: target use of the CPU request, percent.")
    scale_down_delay: Duration = Field(
        300.0, ge=0, le=3600, description="How long fewer pods must have been enough before one is ended."
    )
    keda: KedaOptions = Field(default_factory=KedaOptions, description="With `keda`.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must be at least min_replicas")
        if self.mode is Scaling.KEDA and self.keda.secret is None:
            raise ValueError("keda.secret: name the Secret that holds RabbitMQ's HTTP URI for KEDA")
        return self


class ResourceOptions(Model):
    """The resources that a worker requests, and their limits, as Kubernetes writes them."""

    requests: PublicTexts = Field(default_factory=dict, description="For example `{cpu: '2', memory: 4Gi}`.")
    limits: PublicTexts = Field(default_factory=dict, description="Memory beyond its limit ends the worker.")

    @field_validator("requests", "limits")
    @classmethod
    def _quantities(cls, value: dict[str, str]) -> dict[str, str]:
        """Check the syntax here, because the API server may answer an invalid quantity with an internal error."""
        for name, quantity in value.items():
            if not _QUANTITY.match(quantity):
                raise ValueError(f"{name}: {quantity!r} is not a quantity; write 500m, 2, 512Mi or 4Gi")
        return value


class KubernetesOptions(DriverOptions):
    """`driver.options` of the Kubernetes driver. Objects below `affinity`, `tolerations`, `volumes` and `volume_mounts`
    are passed on unchanged."""

    image: str = Field(..., min_length=1, description="Image of the workers; required.")
    command: tuple[str, ...] | None = Field(
        None, description="Program and arguments of a worker; by default `osrdyne-worker` with `worker.app`."
    )
    namespace: str | None = Field(None, description="Namespace of the workers; by default the daemon's own.")
    kubeconfig: str | None = Field(
        None, description="A kubeconfig file; by default the pod's service account, else `$KUBECONFIG` and its default."
    )
    context: str | None = Field(None, description="Context of the kubeconfig; its current one by default.")
    request_timeout: Duration = Field(10.0, gt=0, description="Limit for one call of the API server.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="By default that of Kubernetes: `Always` for the tag `latest`, else `IfNotPresent`."
    )
    image_pull_secrets: tuple[str, ...] = Field((), description="Names of Secrets with registry credentials.")
    environment: ShellVariables = Field(default_factory=dict, description="Further variables; no secrets.")
    environment_from: tuple[str, ...] = Field((), description="Names of Secrets whose keys become variables.")
    resources: ResourceOptions = Field(default_factory=ResourceOptions, description="CPU and memory of a worker.")
    node_selector: PublicTexts = Field(default_factory=dict, description="Labels that a node must have.")
    affinity: PublicMapping = Field(default_factory=dict, description="An Affinity object.")
    tolerations: tuple[PublicMapping, ...] = Field((), description="Toleration objects.")
    priority_class: str | None = Field(None, description="Name of a PriorityClass.")
    scheduler: str | None = Field(None, description="Name of another scheduler than the cluster's default.")
    service_account: str | None = Field(
        None, description="Service account of the workers; its token is mounted only when this is set."
    )
    run_as_user: int | None = Field(
        None, ge=1, description="User id of the workers; by default the image's, which must be a number and not 0."
    )
    labels: PublicTexts = Field(default_factory=dict, description="Further labels of the pods.")
    annotations: PublicTexts = Field(default_factory=dict, description="Further annotations of the pods.")
    volumes: tuple[dict[str, Any], ...] = Field((), description="Volume objects, for data.")
    volume_mounts: tuple[PublicMapping, ...] = Field((), description="VolumeMount objects, for data.")
    scratch_size: Size | None = Field(
        None, ge=1, description="Limit of `/tmp`, which Spark writes to; the rest of the file system is read-only."
    )
    replicas: int = Field(1, ge=1, description="Pods of a group when there is no autoscaler.")
    autoscaling: AutoscalingOptions = Field(default_factory=AutoscalingOptions, description="How a group is scaled.")

    @field_validator("command")
    @classmethod
    def _no_empty_command(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or not value[0]):
            raise ValueError("give a program, or leave the option out for `osrdyne-worker`")
        return value

    @model_validator(mode="after")
    def _usable_names(self) -> Self:
        for name in [*self.labels, *self.annotations]:
            if name.startswith((LABEL_PREFIX, "app.kubernetes.io/")):
                raise ValueError(f"labels, annotations: {name} is set by osrdyne itself")
        return self

    def contradiction(self, context: DriverContext) -> str | None:
        """Require a service account if Spark in the workers creates the pods of its executors."""
        if context.uses_kubernetes_executors and self.service_account is None:
            return (
                "service_account: worker.spark_master is k8s://…, so workers create pods: name a service account with "
                "that right (the Helm chart creates one with sparkExecutors.enabled)"
            )
        return None

    def max_workers_of_group(self) -> int:
        """The maximum number of pods of one group."""
        scaling = self.autoscaling
        return self.replicas if scaling.mode is Scaling.NONE else scaling.max_replicas

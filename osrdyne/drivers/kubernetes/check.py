"""The checks of the Kubernetes driver for `doctor`: whether the API server answers, the rights, KEDA.

`RIGHTS` are all rights that the driver uses; the Role of the Helm chart grants exactly these, and a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.drivers.base import DriverContext, Finding
from osrdyne.drivers.kubernetes.api import KubernetesApi, KubernetesError
from osrdyne.drivers.kubernetes.options import KubernetesOptions, Scaling
from osrdyne.drivers.kubernetes.scaling import has_keda


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One right in the namespace of the workers. `resource` may have a subresource after a `/`."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


def _rights(group: str, resource: str, *verbs: str) -> tuple[Right, ...]:
    return tuple(Right(group, resource, verb) for verb in verbs)


# Server-side apply needs `create` and `patch`. Secrets are never read.
RIGHTS = (
    *_rights("apps", "deployments", "list", "watch", "create", "patch", "delete"),
    *_rights("", "pods", "list", "watch", "delete"),
    *_rights("", "pods/log", "get"),
    *_rights("", "secrets", "create", "patch"),
)
# Processes of pooled workers are pods without a Deployment.
PROCESS_RIGHTS = _rights("", "pods", "create", "patch")
SCALING_RIGHTS = {
    Scaling.NONE: (),
    Scaling.HPA: _rights("autoscaling", "horizontalpodautoscalers", "create", "patch", "delete"),
    Scaling.KEDA: (
        *_rights("keda.sh", "scaledobjects", "create", "patch", "delete"),
        *_rights("keda.sh", "triggerauthentications", "create", "patch", "delete"),
    ),
}


async def check(api: KubernetesApi, options: KubernetesOptions, context: DriverContext) -> list[Finding]:
    """Run the checks. Never raises."""
    try:
        findings = [await _check_server(api), await _check_rights(api, options, context)]
        if options.autoscaling.mode is Scaling.KEDA:
            findings.append(await _check_keda(api))
        if options.autoscaling.mode is Scaling.HPA:
            findings.append(check_cpu_request(options))
    except KubernetesError as error:
        remedy = "Check driver.options.kubeconfig and context, or the network policy between daemon and API server."
        return [Finding("Kubernetes", ok=False, message=error.message, remedy=remedy)]
    return [*findings, _check_broker(context)]


async def _check_server(api: KubernetesApi) -> Finding:
    version = await api.get_json("version")
    namespace = await api.namespace()
    message = f"Kubernetes {version['gitVersion']} at {api.server}; workers run in the namespace {namespace}."
    return Finding("Kubernetes", ok=True, message=message)


async def _check_rights(api: KubernetesApi, options: KubernetesOptions, context: DriverContext) -> Finding:
    wanted = (*RIGHTS, *SCALING_RIGHTS[options.autoscaling.mode], *(PROCESS_RIGHTS if context.pooled else ()))
    missing = []
    for right in wanted:
        resource, _, subresource = right.resource.partition("/")
        if not await api.may(verb=right.verb, group=right.group, resource=resource, subresource=subresource):
            missing.append(str(right))
    if missing:
        return Finding(
            "rights",
            ok=False,
            message=f"Missing in the namespace {await api.namespace()}: {', '.join(missing)}.",
            remedy="Grant them to the daemon's service account; the Role of the Helm chart holds all of them.",
        )
    return Finding("rights", ok=True, message=f"The service account has all {len(wanted)} rights that the driver uses.")


async def _check_keda(api: KubernetesApi) -> Finding:
    if await has_keda(api):
        return Finding("KEDA", ok=True, message="KEDA's custom resources are installed.")
    remedy = "Install KEDA, or set driver.options.autoscaling.mode to hpa or none."
    return Finding("KEDA", ok=False, message="The custom resources of keda.sh are not installed.", remedy=remedy)


def check_cpu_request(options: KubernetesOptions) -> Finding:
    """Check the CPU request. Not fatal: a LimitRange may set one. A limit without a request counts as the request."""
    if "cpu" in {**options.resources.requests, **options.resources.limits}:
        return Finding(
            "HorizontalPodAutoscaler", ok=True, message="Workers have a CPU request, which the autoscaler needs."
        )
    message = "The autoscaler needs a CPU request, and workers have none."
    remedy = "Set driver.options.resources.requests.cpu, unless a LimitRange of the namespace does."
    return Finding("HorizontalPodAutoscaler", ok=False, message=message, remedy=remedy, fatal=False)


def _check_broker(context: DriverContext) -> Finding:
    """Check that the address of the broker is not localhost, which in a pod is the pod itself."""
    if context.stack.startswith("localhost:"):
        remedy = "Set broker.worker_uri (or broker.uri) to a name that pods can resolve."
        message = "The broker is localhost, which in a pod is the pod itself, unless broker.worker_uri is set."
        return Finding("broker seen from pods", ok=False, message=message, remedy=remedy, fatal=False)
    return Finding("broker seen from pods", ok=True, message=f"Workers connect to the broker at {context.stack}.")

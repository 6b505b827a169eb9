"""The autoscaler of a group: a HorizontalPodAutoscaler, or KEDA's ScaledObject with its TriggerAuthentication.

Called by the driver. It never sets the number of pods, because the autoscaler does.
"""

from __future__ import annotations

from typing import Any

from lightkube.generic_resource import GenericNamespacedResource

from osrdyne.drivers.base import WorkerSpec
from osrdyne.drivers.kubernetes.api import KubernetesApi, KubernetesError, resource_kind
from osrdyne.drivers.kubernetes.manifests import Manifests
from osrdyne.drivers.kubernetes.names import field_manager
from osrdyne.drivers.kubernetes.options import KubernetesOptions, Scaling

HPA_VERSIONS = ("v2", "v2beta2", "v1")  # Latest first. `v2` exists from Kubernetes 1.23 on, `v2beta2` until 1.25.
KEDA_GROUP = "keda.sh"

SCALED_OBJECT = resource_kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
TRIGGER_AUTHENTICATION = resource_kind("keda.sh/v1alpha1", "TriggerAuthentication", "triggerauthentications")
_HPA = {
    version: resource_kind(f"autoscaling/{version}", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
    for version in HPA_VERSIONS
}


async def apply_autoscaler(
    api: KubernetesApi, manifests: Manifests, options: KubernetesOptions, spec: WorkerSpec, *, owner: str
) -> None:
    """Create or change the autoscaler that the options name. Raises `KubernetesError`."""
    manager = field_manager(spec.worker_id)
    if options.autoscaling.mode is Scaling.HPA:
        version = await hpa_version(api)
        manifest = manifests.autoscaler(spec, owner=owner, version=version)
        await api.apply(_HPA[version], manifest, manager=manager, force=True)
    elif options.autoscaling.mode is Scaling.KEDA:
        authentication = manifests.keda_authentication(spec, owner=owner)
        await _apply_keda(api, TRIGGER_AUTHENTICATION, authentication, manager=manager)
        await _apply_keda(api, SCALED_OBJECT, manifests.scaled_object(spec, owner=owner), manager=manager)


async def remove_autoscaler(api: KubernetesApi, name: str, mode: Scaling) -> None:
    """Remove the autoscaler of a group that was created with `mode`."""
    if mode is Scaling.HPA:
        await api.delete(_HPA[await hpa_version(api)], name)
    elif mode is Scaling.KEDA:
        await api.delete(SCALED_OBJECT, name)
        await api.delete(TRIGGER_AUTHENTICATION, name)


async def hpa_version(api: KubernetesApi) -> str:
    """The latest version of the HorizontalPodAutoscaler in this cluster that the driver supports."""
    found: dict[str, Any] = await api.get_json("apis/autoscaling")
    served = {version["version"] for version in found["versions"]}
    for version in HPA_VERSIONS:
        if version in served:
            return version
    versions = ", ".join(HPA_VERSIONS)
    raise KubernetesError(f"This cluster has none of the versions {versions} of the HorizontalPodAutoscaler.", code=404)


async def has_keda(api: KubernetesApi) -> bool:
    """Whether KEDA's custom resources are installed."""
    groups = await api.get_json("apis")
    return any(group["name"] == KEDA_GROUP for group in groups["groups"])


async def _apply_keda(
    api: KubernetesApi, kind: type[GenericNamespacedResource], manifest: dict[str, Any], *, manager: str
) -> None:
    try:
        await api.apply(kind, manifest, manager=manager, force=True)
    except KubernetesError as error:
        if error.code != 404:
            raise
        message = (
            f"KEDA is not installed in this cluster: {manifest['kind']} of keda.sh is unknown. "
            "Install KEDA, or set driver.options.autoscaling.mode to hpa or none."
        )
        raise KubernetesError(message, code=404) from error

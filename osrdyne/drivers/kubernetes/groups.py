"""Translate the listed Deployments and Pods of a pool into one instance for each group or process. Pure.

A Deployment is one instance, independent of the number of its pods (decision 0015): Kubernetes restarts, scales and
rolls them. An instance counts as ended if no pod is ready and each of them fails in a way that Kubernetes does not
repair. A process of pooled workers is a pod without a Deployment; it ends with its container.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightkube.models.core_v1 import ContainerStateTerminated, ContainerStatus
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod

from osrdyne.drivers.base import Exit, Instance, InstanceId, InstanceState
from osrdyne.drivers.kubernetes.manifests import CONTAINER
from osrdyne.drivers.kubernetes.names import (
    ENCODED_KEY_ANNOTATION,
    PROCESS_LABEL,
    SCALING_ANNOTATION,
    SLOT_LABEL,
    SPEC_ANNOTATION,
    WORKER_LABEL,
    PoolLabels,
)
from osrdyne.drivers.kubernetes.options import Scaling
from osrdyne.protocol.names import Key, WorkerId, decode_key

# Reasons of containers that do not start without a change. Not `ErrImagePull`, after which another pull follows.
_PERMANENT_REASONS = frozenset(
    {
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
_CRASH_LOOP = "CrashLoopBackOff"


@dataclass(frozen=True, slots=True)
class Group:
    """One start of a group: its name, the Deployment (None if an operator deleted it), and the existing pods."""

    name: str
    worker_id: WorkerId
    deployment: Deployment | None
    pods: tuple[Pod, ...]

    @property
    def instance_id(self) -> InstanceId:
        return InstanceId(self.worker_id)

    @property
    def metadata(self) -> ObjectMeta:
        """The metadata of the Deployment, or of a remaining pod."""
        return meta(self.deployment or self.pods[0])

    @property
    def is_ending(self) -> bool:
        """Whether its deletion has been requested."""
        if self.deployment is not None:
            return meta(self.deployment).deletionTimestamp is not None
        return all(meta(pod).deletionTimestamp is not None for pod in self.pods)

    @property
    def live_pods(self) -> list[Pod]:
        """The pods that run or will run: neither being deleted, nor left by an eviction."""
        return [
            pod
            for pod in self.pods
            if meta(pod).deletionTimestamp is None and _phase(pod) not in {"Failed", "Succeeded"}
        ]


def gather(deployments: Iterable[Deployment], pods: Iterable[Pod], names: PoolLabels) -> list[Group]:
    """Group Deployments and pods by start, without foreign objects (`is_ours`).

    The pods must have been listed before the Deployments: then the Deployment of a pod without one was deleted.
    """
    by_worker: dict[str, list[Pod]] = defaultdict(list)
    for pod in pods:
        if is_ours(pod, names):
            by_worker[_label(meta(pod), WORKER_LABEL)].append(pod)
    groups = []
    for deployment in deployments:
        if is_ours(deployment, names):
            worker_id = _label(meta(deployment), WORKER_LABEL)
            found = tuple(by_worker.pop(worker_id, ()))
            groups.append(Group(meta(deployment).name or "", WorkerId(worker_id), deployment, found))
    for worker_id, orphans in by_worker.items():
        groups.append(Group(_wanted_name(orphans[0], names) or "", WorkerId(worker_id), None, tuple(orphans)))
    return groups


def is_ours(item: Deployment | Pod, names: PoolLabels) -> bool:
    """Whether an object has the name that its key and slot imply; a copy with the same labels has another."""
    name = _wanted_name(item, names)
    if name is None:
        return False
    return is_pod_of(name, item) if isinstance(item, Pod) else meta(item).name == name


def is_pod_of(name: str, pod: Pod) -> bool:
    """Whether the pod belongs to the Deployment of that name, or is the process of that name."""
    if is_process_pod(pod):
        return meta(pod).name == name
    return (meta(pod).name or "").startswith(f"{name}-{_label(meta(pod), 'pod-template-hash')}-")


def is_process_pod(pod: Pod) -> bool:
    """Whether it is a process of pooled workers, which has no Deployment."""
    return bool(_label(meta(pod), PROCESS_LABEL))


def to_instance(group: Group) -> Instance | None:
    """The instance of a group; None if the labels name no key or slot."""
    metadata = group.metadata
    key, slot = _identity(metadata)
    if key is None or slot is None:
        return None
    end = None if group.is_ending else end_of(group)
    running = InstanceState.STOPPING if group.is_ending else InstanceState.RUNNING
    created = metadata.creationTimestamp
    return Instance(
        instance_id=group.instance_id,
        key=key,
        slot=slot,
        worker_id=group.worker_id,
        state=running if end is None else InstanceState.EXITED,
        spec_hash=(metadata.annotations or {}).get(SPEC_ANNOTATION, ""),
        started_at=0.0 if created is None else created.timestamp(),
        external_id=metadata.name or "",
        exit=end,
    )


def end_of(group: Group) -> Exit | None:
    """How a group ended, if Kubernetes alone cannot start it again; otherwise None."""
    if group.deployment is None and is_process_pod(group.pods[0]):
        return _end_of_process(group.pods[0])
    refused = _refusal(group.deployment)
    pods = group.live_pods
    if not pods:
        return None if refused is None else Exit(reason=refused)
    if any(is_ready(pod) for pod in pods):
        return None
    served = has_served(group.deployment)
    ends = [_end_of_pod(pod, served=served) for pod in pods]
    return ends[0] if all(end is not None for end in ends) else None


def has_served(deployment: Deployment | None) -> bool:
    """Whether all pods have been ready once: then a container that ends is restarted, and the group has not failed."""
    conditions = deployment.status.conditions if deployment is not None and deployment.status is not None else None
    return any(
        condition.type == "Progressing" and condition.reason == "NewReplicaSetAvailable"
        for condition in conditions or ()
    )


def scaling_of(deployment: Deployment) -> Scaling:
    """The autoscaler with which the group was created."""
    named = (meta(deployment).annotations or {}).get(SCALING_ANNOTATION)
    return Scaling(named) if named in set(Scaling) else Scaling.NONE


def is_ready(pod: Pod) -> bool:
    conditions = pod.status.conditions if pod.status is not None else None
    return any(condition.type == "Ready" and condition.status == "True" for condition in conditions or ())


def restarts(pod: Pod) -> int:
    status = container_status(pod)
    return 0 if status is None else status.restartCount


def last_exit(pod: Pod) -> Exit | None:
    """How the worker in this pod last ended; None if it has not ended yet."""
    status = container_status(pod)
    if status is None:
        return None
    for state in (status.state, status.lastState):
        if state is not None and state.terminated is not None:
            return _to_exit(state.terminated)
    return None


def is_running(pod: Pod) -> bool:
    status = container_status(pod)
    return status is not None and status.state is not None and status.state.running is not None


def has_terminated(pod: Pod) -> bool:
    status = container_status(pod)
    return status is not None and status.state is not None and status.state.terminated is not None


def trouble(group: Group) -> tuple[str, ...]:
    """Why the group does not run: a line for each pod that does not."""
    lines = [f"Kubernetes: {refused}" for refused in (_refusal(group.deployment),) if refused]
    for pod in group.live_pods:
        why = _trouble_of_pod(pod)
        if why and not is_ready(pod):
            lines.append(f"Kubernetes: pod {meta(pod).name}: {why}")
    return tuple(lines)


def container_status(pod: Pod) -> ContainerStatus | None:
    statuses = (pod.status.containerStatuses if pod.status is not None else None) or ()
    return next((status for status in statuses if status.name == CONTAINER), None)


def meta(item: Deployment | Pod) -> ObjectMeta:
    """The metadata of an object; every listed object has them."""
    return item.metadata or ObjectMeta()


def uid_of(item: Deployment | Pod) -> str:
    return meta(item).uid or ""


def sorted_by_trouble(pods: Sequence[Pod]) -> list[Pod]:
    """The pods that are not ready first, and of these the ones with the most restarts."""
    return sorted(pods, key=lambda pod: (is_ready(pod), -restarts(pod), meta(pod).name or ""))


# --- internals


def _end_of_pod(pod: Pod, *, served: bool) -> Exit | None:
    status = container_status(pod)
    if status is None:
        return None
    waiting = status.state.waiting if status.state is not None else None
    if waiting is not None and waiting.reason in _PERMANENT_REASONS:
        return Exit(reason=_reason(waiting.reason, waiting.message))
    if waiting is not None and waiting.reason == _CRASH_LOOP:
        end = last_exit(pod) or Exit()
        return Exit(code=end.code, signal=end.signal, reason=end.reason or _CRASH_LOOP)
    return None if served else last_exit(pod)


def _end_of_process(pod: Pod) -> Exit | None:
    """How a process ended, whose pod is never started again; None if it has not."""
    end = _end_of_pod(pod, served=False)
    if end is not None or _phase(pod) not in {"Failed", "Succeeded"}:
        return end
    # Evicted, or its node is gone: the pod has no state of the container.
    status = pod.status
    return Exit(reason=None if status is None else _reason(status.reason, status.message) or None)


def _trouble_of_pod(pod: Pod) -> str | None:
    status = container_status(pod)
    waiting = status.state.waiting if status is not None and status.state is not None else None
    if waiting is not None and waiting.reason not in {None, "ContainerCreating", "PodInitializing"}:
        return _reason(waiting.reason, waiting.message)
    for condition in (pod.status.conditions if pod.status is not None else None) or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return _reason(condition.reason, condition.message)
    return None


def _refusal(deployment: Deployment | None) -> str | None:
    """Why the cluster refuses the pods of this Deployment (a quota, an admission rule); None if it does not."""
    conditions = deployment.status.conditions if deployment is not None and deployment.status is not None else None
    for condition in conditions or ():
        if condition.type == "ReplicaFailure" and condition.status == "True":
            return _reason(condition.reason, condition.message)
    return None


def _to_exit(state: ContainerStateTerminated) -> Exit:
    if state.reason == "OOMKilled":
        return Exit(code=state.exitCode, reason="out of memory (OOMKilled)")
    ordinary = {None, "", "Error", "Completed"}
    return Exit(code=state.exitCode, reason=None if state.reason in ordinary else _reason(state.reason, state.message))


def _reason(reason: str | None, message: str | None) -> str:
    return ": ".join(part for part in (reason, message) if part)


def _phase(pod: Pod) -> str | None:
    return pod.status.phase if pod.status is not None else None


def _wanted_name(item: Deployment | Pod, names: PoolLabels) -> str | None:
    key, slot = _identity(meta(item))
    return None if key is None or slot is None else names.object_name(key, slot)


def _identity(metadata: ObjectMeta) -> tuple[Key | None, int | None]:
    key = decode_key((metadata.annotations or {}).get(ENCODED_KEY_ANNOTATION, "-"))
    slot = _label(metadata, SLOT_LABEL)
    return key, int(slot) if slot.isdecimal() else None


def _label(metadata: ObjectMeta, name: str) -> str:
    labels: Mapping[str, str] = metadata.labels or {}
    return labels.get(name, "")

"""Ends a group: deletes its Deployment, and watches its pods until all are gone.

Called by the driver. It changes only the objects of one start.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod
from lightkube.types import CascadeType

from osrdyne.drivers.base import Exit
from osrdyne.drivers.kubernetes.api import KubernetesApi, KubernetesError
from osrdyne.drivers.kubernetes.groups import Group, has_terminated, is_pod_of, last_exit, meta, uid_of
from osrdyne.drivers.kubernetes.names import worker_selector
from osrdyne.errors import DriverUnavailableError

_SLACK = 60.0  # Seconds after the grace period within which Kubernetes must report that the pods are gone.

LastLines = Callable[[Pod], Awaitable[tuple[str, ...]]]


@dataclass(slots=True)
class End:
    """How the pods of a group ended: the exit of one of them, and its last lines if they could be read."""

    exit: Exit | None = None
    lines: tuple[str, ...] = ()


async def end_group(api: KubernetesApi, group: Group, *, grace: float, read: LastLines) -> End:
    """Delete the objects of a group and return when its pods are gone. `read`: reads the last lines of an ended pod.

    Raises `DriverUnavailableError` if the pods do not end in time.
    """
    end = End()
    if group.deployment is not None:
        name = meta(group.deployment).name or ""
        await api.delete(Deployment, name, uid=uid_of(group.deployment), cascade=CascadeType.FOREGROUND)
    else:
        for pod in group.pods:
            await api.delete(Pod, meta(pod).name or "", uid=uid_of(pod), grace=_seconds(grace))
    try:
        async with asyncio.timeout(grace + _SLACK):
            await _until_pods_are_gone(api, group, end, grace=grace, read=read)
            await _until_gone(api, group)
    except TimeoutError:
        raise DriverUnavailableError(
            f"The pods of worker {group.worker_id} do not end: their node may be lost, or a ReplicaSet without a "
            f"Deployment creates new ones. See `kubectl get pods,replicasets -l {worker_selector(group.worker_id)}`."
        ) from None
    return end


async def _until_pods_are_gone(api: KubernetesApi, group: Group, end: End, *, grace: float, read: LastLines) -> None:
    """Watch the pods until they are gone, and note their exits. The DELETED event of a pod contains its last state."""
    selector = worker_selector(group.worker_id)
    while True:
        listed, version = await api.list(Pod, selector)
        pods = [pod for pod in listed if is_pod_of(group.name, pod)]
        left = {uid_of(pod) for pod in pods}
        for pod in pods:
            await _observe(api, pod, end, grace=grace, read=read)
        try:
            while left:
                async with aclosing(api.watch(Pod, selector, version)) as changes:
                    async for event, pod in changes:
                        version = meta(pod).resourceVersion or version
                        if not is_pod_of(group.name, pod):
                            continue
                        if event == "DELETED":
                            end.exit = last_exit(pod) or end.exit
                            left.discard(uid_of(pod))
                        else:
                            left.add(uid_of(pod))
                            await _observe(api, pod, end, grace=grace, read=read)
                        if not left:
                            break
            return
        except KubernetesError as error:
            if error.code != 410:
                raise


async def _observe(api: KubernetesApi, pod: Pod, end: End, *, grace: float, read: LastLines) -> None:
    """Note the exit of a pod's container, and shorten a grace period that is longer than `grace`."""
    if has_terminated(pod):
        end.exit = last_exit(pod)
        end.lines = await read(pod) or end.lines
    metadata = meta(pod)
    if metadata.deletionTimestamp is not None and (metadata.deletionGracePeriodSeconds or 0) > _seconds(grace):
        await api.delete(Pod, metadata.name or "", uid=uid_of(pod), grace=_seconds(grace))


async def _until_gone(api: KubernetesApi, group: Group) -> None:
    """Wait until the Deployment itself is gone, so that its name is free."""
    selector = worker_selector(group.worker_id)
    while True:
        found, version = await api.list(Deployment, selector)
        if all(meta(deployment).name != group.name for deployment in found):
            return
        try:
            async with aclosing(api.watch(Deployment, selector, version)) as changes:
                async for event, _ in changes:
                    if event == "DELETED":
                        break
        except KubernetesError as error:
            if error.code != 410:
                raise


def _seconds(grace: float) -> int:
    """The grace in whole seconds, at least 1: with 0, Kubernetes deletes the pod object while the pod may still run."""
    return max(1, math.ceil(grace))

"""The driver that runs each group as a Kubernetes Deployment, and each process of pooled workers as a Pod.

One start is one Deployment or Pod with a Secret for the broker URI and, if configured, an autoscaler. The driver finds
all objects by their labels; those that belong to a Deployment or Pod are deleted with it. Kubernetes restarts, scales
and rolls the pods; this driver starts and ends groups, and reports when a group cannot start (decision 0015).
`manifests` builds the objects, `groups` interprets them, `api` makes the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import ClassVar

from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod, Secret

from osrdyne.aio.clock import Backoff
from osrdyne.drivers.base import (
    Driver,
    DriverContext,
    DriverOptions,
    Finding,
    Instance,
    InstanceId,
    InstanceState,
    WorkerSpec,
    hash_options,
)
from osrdyne.drivers.kubernetes.api import KubernetesApi, KubernetesError
from osrdyne.drivers.kubernetes.check import check
from osrdyne.drivers.kubernetes.ending import end_group
from osrdyne.drivers.kubernetes.groups import (
    Group,
    container_status,
    gather,
    is_ours,
    is_ready,
    is_running,
    meta,
    restarts,
    scaling_of,
    sorted_by_trouble,
    to_instance,
    trouble,
    uid_of,
)
from osrdyne.drivers.kubernetes.manifests import CONTAINER, Manifests
from osrdyne.drivers.kubernetes.names import PoolLabels, field_manager, is_process, replicas_manager, worker_selector
from osrdyne.drivers.kubernetes.options import KubernetesOptions, Scaling
from osrdyne.drivers.kubernetes.scaling import apply_autoscaler, remove_autoscaler
from osrdyne.errors import DriverError, DriverUnavailableError, SlotTakenError, StartFailedError
from osrdyne.logs import get_logger

_GATHER_DELAY = 0.25  # Seconds in which changes count as one: the start of a pod causes half a dozen.
_WATCH_RETRY = Backoff(initial=0.5, maximum=30.0)
_LAST_LINES = 100
_LOGS_OF_PODS = 5
_ACCESS_OPTIONS = frozenset({"kubeconfig", "context", "namespace", "request_timeout"})

log = get_logger("drivers.kubernetes")


@dataclass(frozen=True, slots=True)
class _Ended:
    """A group that this driver has ended, until the pool removes it; Kubernetes has no object of it any more."""

    instance: Instance
    lines: tuple[str, ...]


class KubernetesDriver(Driver):
    """Starts, lists and ends groups of workers. Its options: `KubernetesOptions`."""

    name: ClassVar[str] = "kubernetes"
    options_model: ClassVar[type[DriverOptions]] = KubernetesOptions
    instance_is_worker: ClassVar[bool] = False

    def __init__(self, options: KubernetesOptions, context: DriverContext) -> None:
        super().__init__(options, context)
        self._options = options
        self.workers_of_start = options.max_workers_of_group() + 1  # `maxSurge` of a rolling update
        self._api = KubernetesApi(options)
        self._names = PoolLabels.of(context)
        self._selector = self._names.selector
        self._manifests = Manifests(options, context, spec_hash=self.spec_hash())
        self._ended: dict[InstanceId, _Ended] = {}
        self._foreign: set[str] = set()
        self._undoing: set[asyncio.Task[None]] = set()

    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        return hash_options(
            {
                "options": self._options.model_dump(mode="json", exclude=set(_ACCESS_OPTIONS)),
                "app": self.context.worker_app,
                "config": self.context.shape_of(config),
            }
        )

    async def list_instances(self) -> list[Instance]:
        deployments, pods = await self._listed(self._selector)
        self._report_foreign({meta(item).name or "" for item in deployments if not is_ours(item, self._names)})
        listed = [instance for group in gather(deployments, pods, self._names) if (instance := to_instance(group))]
        known = {instance.instance_id for instance in listed}
        return listed + [ended.instance for name, ended in self._ended.items() if name not in known]

    async def start(self, spec: WorkerSpec) -> Instance:
        kind = Pod if is_process(spec) else Deployment
        try:
            # First, because it is the lock of the slot and the owner of the other objects.
            created = await self._create(kind, spec)
            await self._complete(spec, created)
        except KubernetesError as error:
            if error.is_final:
                raise StartFailedError(error.message) from error
            raise
        name = meta(created).name or ""
        if isinstance(created, Pod):
            instance = to_instance(Group(name, spec.worker_id, None, (created,)))
        else:
            instance = to_instance(Group(name, spec.worker_id, created, ()))
        if instance is None:
            raise DriverUnavailableError(f"The API server did not store the labels of the {kind.__name__}.")
        return instance

    async def update(self, instance_id: InstanceId, spec: WorkerSpec) -> Instance | None:
        """Apply the present settings. Kubernetes rolls the pods if their template has changed; the Secret stays."""
        group = await self._find(instance_id)
        if group is None or group.deployment is None or group.is_ending:
            return None
        spec = replace(spec, environment=replace(spec.environment, worker_id=group.worker_id))
        try:
            deployment = await self._change(spec, group.deployment)
        except KubernetesError as error:
            if error.is_final:
                raise StartFailedError(error.message) from error
            raise
        return to_instance(replace(group, deployment=deployment))

    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        group = await self._find(instance_id)
        instance = None if group is None else to_instance(group)
        if group is None or instance is None or instance.state is InstanceState.EXITED:
            return
        # Before the end: the logs of a pod are deleted with it.
        lines = await self._last_lines_of_group(group)
        end = await end_group(self._api, group, grace=grace, read=self._last_lines)
        instance = replace(instance, state=InstanceState.EXITED, exit=end.exit)
        # Only in memory. If the leader dies here, the end is lost: the next leader lists no instance of the group.
        self._ended[instance_id] = _Ended(instance, end.lines or lines)

    async def remove(self, instance_id: InstanceId) -> None:
        if self._ended.pop(instance_id, None) is not None:
            return
        group = await self._find(instance_id)
        instance = None if group is None else to_instance(group)
        if group is not None and instance is not None and instance.state is InstanceState.EXITED:
            await end_group(self._api, group, grace=0, read=_nothing)

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        if lines == 0:
            return ()
        ended = self._ended.get(instance_id)
        if ended is not None:
            return ended.lines[-lines:]
        group = await self._find(instance_id)
        return () if group is None else await self._read_logs(group, lines=lines)

    async def events(self) -> AsyncIterator[None]:
        changed = asyncio.Event()
        watches = [
            asyncio.create_task(self._follow(Deployment, changed), name="watch of Deployments"),
            asyncio.create_task(self._follow(Pod, changed), name="watch of Pods"),
        ]
        for watch in watches:
            watch.add_done_callback(lambda _: changed.set())
        try:
            while True:
                await changed.wait()
                for watch in watches:
                    if watch.done():
                        watch.result()  # a watch ends only with an error, which is raised here
                await self.context.clock.sleep(_GATHER_DELAY)
                changed.clear()
                yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def check(self) -> list[Finding]:
        return await check(self._api, self._options, self.context)

    async def close(self) -> None:
        await asyncio.gather(*self._undoing)
        await self._api.close()

    # --- starting

    async def _create(self, kind: type[Deployment] | type[Pod], spec: WorkerSpec) -> Deployment | Pod:
        """Create the Deployment of a group, or the Pod of a process. Its name contains the slot, so the API server
        accepts only one start."""
        manifest = self._manifests.process(spec) if kind is Pod else self._manifests.deployment(spec)
        try:
            return await self._api.apply(kind, manifest, manager=field_manager(spec.worker_id))
        except KubernetesError as error:
            if error.code == 409:
                # Names are unique in a namespace (lifecycle: unique-instance-names).
                raise SlotTakenError(
                    f"A {kind.__name__} of this key and slot exists already.", key=spec.key, slot=spec.slot
                ) from error
            raise

    async def _complete(self, spec: WorkerSpec, created: Deployment | Pod) -> None:
        """Create the other objects of a start. On an error or a cancellation, delete the Deployment or Pod again."""
        try:
            await self._apply_owned(spec, owner=uid_of(created))
        except BaseException:
            undoing = asyncio.create_task(self._undo(created), name="undo of a start")
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            # Shielded: the start may have been cancelled, and an incomplete group would hold the slot.
            await asyncio.shield(undoing)
            raise

    async def _apply_owned(self, spec: WorkerSpec, *, owner: str) -> None:
        secret = self._manifests.secret(spec, owner=owner)
        # Owned by the Deployment or Pod, so that Kubernetes deletes both together.
        await self._api.apply(Secret, secret, manager=field_manager(spec.worker_id), force=True)
        if not is_process(spec):  # its pod is the only one; the pooled driver counts processes
            await self._apply_scaling(spec, owner=owner)

    async def _apply_scaling(self, spec: WorkerSpec, *, owner: str) -> None:
        if self._options.autoscaling.mode is Scaling.NONE:
            patch = self._manifests.replicas_patch(spec, uid=owner)
            await self._api.apply(Deployment, patch, manager=replicas_manager(spec.worker_id), force=True)
        else:
            await apply_autoscaler(self._api, self._manifests, self._options, spec, owner=owner)

    async def _change(self, spec: WorkerSpec, deployment: Deployment) -> Deployment:
        """Change the objects of a group; the Deployment last, because its hash shows that all others are changed."""
        uid, before = uid_of(deployment), scaling_of(deployment)
        if before is not self._options.autoscaling.mode:
            await remove_autoscaler(self._api, self._manifests.owned_name(spec), before)
        await self._apply_scaling(spec, owner=uid)
        manifest = self._manifests.deployment(spec, uid=uid)
        return await self._api.apply(Deployment, manifest, manager=field_manager(spec.worker_id), force=True)

    async def _undo(self, created: Deployment | Pod) -> None:
        try:
            # By uid: a later object of the same name is another group or process.
            await self._api.delete(type(created), meta(created).name or "", uid=uid_of(created))
        except DriverError as error:
            log.warning("unfinished start not removed", name=meta(created).name, error=str(error))

    # --- observing

    async def _listed(self, selector: str) -> tuple[list[Deployment], list[Pod]]:
        pods, _ = await self._api.list(Pod, selector)  # before the Deployments, as `gather` requires
        deployments, _ = await self._api.list(Deployment, selector)
        return deployments, pods

    def _report_foreign(self, names: set[str]) -> None:
        """Log each Deployment once that has labels of the pool and another name."""
        for name in sorted(names - self._foreign):
            log.warning("foreign Deployment with osrdyne labels", name=name)
        self._foreign = names

    async def _find(self, instance_id: InstanceId) -> Group | None:
        deployments, pods = await self._listed(f"{self._selector},{worker_selector(instance_id)}")
        groups = gather(deployments, pods, self._names)
        return groups[0] if groups else None

    async def _follow(self, kind: type[Deployment] | type[Pod], changed: asyncio.Event) -> None:
        """Watch one kind; never returns. Lists again after a watch that broke, because changes may be lost."""
        failures = 0
        while True:
            try:
                # The watch begins at the version of the list, and so misses no change in between.
                _, version = await self._api.list(kind, self._selector)
                changed.set()
                while True:
                    async with aclosing(self._api.watch(kind, self._selector, version)) as changes:
                        async for _, item in changes:
                            version, failures = meta(item).resourceVersion or version, 0
                            changed.set()
                    failures = 0
            except KubernetesError as error:
                if error.code == 410:  # the API server no longer has that version: list again
                    continue
                failures += 1
                log.warning("watch interrupted", kind=kind.__name__, error=error.message)
            await self.context.clock.sleep(_WATCH_RETRY.delay(failures))

    async def _read_logs(self, group: Group, *, lines: int) -> tuple[str, ...]:
        """The last lines of the pods; if they wrote nothing, why they do not run."""
        collected: list[str] = []
        pods = [pod for pod in sorted_by_trouble(group.pods) if container_status(pod) is not None][:_LOGS_OF_PODS]
        for pod in pods:
            found = await self._read_pod(pod, lines=lines)
            collected += found if len(pods) == 1 else (f"{meta(pod).name}: {line}" for line in found)
        return tuple(collected) or trouble(group)

    async def _read_pod(self, pod: Pod, *, lines: int) -> tuple[str, ...]:
        """The last lines of a pod's worker: of its previous run as long as the present one is not ready."""
        previous = restarts(pod) > 0 and is_running(pod) and not is_ready(pod)
        return await self._api.logs(meta(pod).name or "", container=CONTAINER, lines=lines, previous=previous)

    def obstacle_to_processes(self) -> str | None:
        options = self._options
        if options.autoscaling.mode is not Scaling.NONE or options.replicas != 1:
            return (
                "driver.options.replicas and driver.options.autoscaling are for groups of dedicated workers: "
                "worker.pooled.max_processes limits the number of processes."
            )
        return None

    async def _last_lines_of_group(self, group: Group) -> tuple[str, ...]:
        """The last lines of a group before it ends; an error here does not delay its end."""
        try:
            return await self._read_logs(group, lines=_LAST_LINES)
        except DriverError:
            return trouble(group)

    async def _last_lines(self, pod: Pod) -> tuple[str, ...]:
        try:
            return await self._read_pod(pod, lines=_LAST_LINES)
        except DriverError:
            return ()


async def _nothing(_pod: Pod) -> tuple[str, ...]:
    return ()

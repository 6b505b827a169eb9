"""Starts of Deployments: the floor is the same two objects of each group, applied with lightkube.

`KUBECONFIG` names the cluster. A start is done when the API server has taken the objects. The pods ask for a scheduler
that does not exist, so none of them ever runs. Everything is in a namespace that is deleted at the end, not group by
group between the rounds: Kubernetes' controllers take half a minute for fifty.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Namespace, Secret
from lightkube.types import PatchType

from osrdyne.drivers.base import WorkerSpec
from osrdyne.drivers.kubernetes import KubernetesDriver
from osrdyne.drivers.kubernetes.manifests import Manifests
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from tests.benchmarks.figures import Figure
from tests.benchmarks.starts import COMMAND, NotMeasuredError, make_context, make_specs, measure, starts_figure

ROUNDS = 5
TIMEOUT = 60.0
FIELD_MANAGER = "osrdyne-bench"


async def run() -> Figure:
    path = os.environ.get("KUBECONFIG")
    if not path:
        raise NotMeasuredError("no KUBECONFIG: starts of Deployments are not measured")
    async with _namespace(path) as namespace:
        options = KubernetesOptions(
            image="registry.example/worker:1", command=COMMAND, scheduler="absent", namespace=namespace,
            kubeconfig=path, request_timeout=TIMEOUT,
        )  # fmt: skip
        driver, floor = partial(KubernetesDriver, options), partial(_bare, path, options)
        rounds = await measure(driver, floor, rounds=ROUNDS, end=lambda driver: driver.close())
    return starts_figure("kubernetes", rounds, at_least=0.5)


@asynccontextmanager
async def _namespace(path: str) -> AsyncIterator[str]:
    name = f"osrdyne-bench-{secrets.token_hex(4)}"
    with _reported_if_unusable():
        client = _make_client(path, name)
        await client.create(Namespace(metadata=ObjectMeta(name=name)))
    try:
        yield name
    finally:
        await client.delete(Namespace, name)
        await client.close()


@contextmanager
def _reported_if_unusable() -> Iterator[None]:
    """A cluster that is not there, or refuses, costs only its own figure."""
    try:
        yield
    except (ConfigError, OSError, httpx2.HTTPError) as error:
        reason = str(error) or type(error).__name__
        raise NotMeasuredError(f"KUBECONFIG: {reason}: starts of Deployments are not measured") from error


def _make_client(path: str, namespace: str | None) -> AsyncClient:
    return AsyncClient(KubeConfig.from_file(path), namespace=namespace, timeout=httpx2.Timeout(TIMEOUT))


async def _bare(path: str, options: KubernetesOptions) -> float:
    """Seconds. The connections are new, as the driver's are."""
    context = make_context()
    manifests = Manifests(options, context, spec_hash="bench")
    specs = make_specs(context.pool)
    began = time.perf_counter()
    client = _make_client(path, options.namespace)
    await asyncio.gather(*(_apply(client, manifests, spec) for spec in specs))
    took = time.perf_counter() - began
    await client.close()
    return took


async def _apply(client: AsyncClient, manifests: Manifests, spec: WorkerSpec) -> None:
    """The Deployment, with its number of pods, and then the Secret that belongs to it."""
    apply = partial(client.patch, patch_type=PatchType.APPLY, field_manager=FIELD_MANAGER)
    manifest = manifests.deployment(spec)
    manifest["spec"]["replicas"] = 1
    deployment = await apply(Deployment, manifests.name(spec), manifest)
    await apply(Secret, manifests.owned_name(spec), manifests.secret(spec, owner=deployment.metadata.uid))

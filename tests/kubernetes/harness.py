"""Drivers for these tests: each test a stack of its own in the one namespace, so that none sees another's objects."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from lightkube import ApiError, Client
from lightkube.config.kubeconfig import SingleConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment, ReplicaSet
from lightkube.resources.core_v1 import Namespace, Pod, Secret
from lightkube.types import CascadeType
from played_kubelet import PlayedKubelet

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext, Instance
from osrdyne.drivers.kubernetes import KubernetesDriver
from osrdyne.drivers.kubernetes.names import POOL_LABEL, PoolLabels
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.testing.driver_harness import POOL, DriverHarness
from tests.chaos.proxy import Proxy

SCHEDULER = "played-by-the-tests"


class KubernetesHarness(DriverHarness):
    """Drivers that reach the API server through a proxy that can be cut."""

    def __init__(self, kubelet: PlayedKubelet, namespace: str, kubeconfig: Path, proxy: Proxy) -> None:
        self.kubelet = kubelet
        self.namespace = namespace
        self.kubeconfig = kubeconfig
        self.stack = f"broker-{secrets.token_hex(4)}.example:5672//"
        self._proxy = proxy

    def driver(self, pool: str = POOL) -> KubernetesDriver:
        return self.make(pool)

    def changed_driver(self, pool: str = POOL) -> KubernetesDriver:
        return self.make(pool, environment={"CHANGED": "yes"})

    def make(self, pool: str = POOL, **options: Any) -> KubernetesDriver:
        given = {"image": "registry.example/worker:1", "scheduler": SCHEDULER, "namespace": self.namespace}
        access = {"kubeconfig": str(self.kubeconfig), "request_timeout": 60.0}
        app = "example.module:app"
        worker = {"worker_command": ("/somewhere/bin/osrdyne-worker", app), "worker_app": app}
        context = DriverContext(pool=pool, stack=self.stack, clock=SystemClock(), **worker)
        return KubernetesDriver(KubernetesOptions(**(given | access | options)), context)

    def remove_all(self, admin: Client, pool: str = POOL) -> None:
        """Object by object: the garbage collector, which `Driver.stop` waits for, takes half a minute for fifty."""
        labels = {POOL_LABEL: PoolLabels(self.stack, pool).pool_hash}
        for kind in (Deployment, ReplicaSet, Pod, Secret):
            for item in admin.list(kind, namespace=self.namespace, labels=labels):
                name = item.metadata.name
                with suppress(ApiError):  # it is gone already
                    admin.delete(kind, name, namespace=self.namespace, cascade=CascadeType.BACKGROUND, grace_period=0)

    async def kill(self, instance: Instance) -> None:
        await self.kubelet.crash(instance.worker_id)

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        self._proxy.refusing = True
        self._proxy.cut()
        yield
        self._proxy.refusing = False


@contextmanager
def own_namespace(admin: Client) -> Iterator[str]:
    name = f"osrdyne-test-{secrets.token_hex(4)}"
    admin.create(Namespace(metadata=ObjectMeta(name=name)))
    yield name
    admin.delete(Namespace, name)


@asynccontextmanager
async def harness_for(
    cluster: SingleConfig, kubelet: PlayedKubelet, namespace: str, directory: Path
) -> AsyncIterator[KubernetesHarness]:
    host, _, port = cluster.cluster.server.removeprefix("https://").partition(":")
    assert host in {"127.0.0.1", "localhost"}, "These tests cut the way to the API server, which must be on loopback."
    async with Proxy(int(port)) as proxy:
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(kubeconfig_with(cluster, f"https://127.0.0.1:{proxy.port}"))
        yield KubernetesHarness(kubelet, namespace, kubeconfig, proxy)


def kubeconfig_with(cluster: SingleConfig, server: str, *, token: str | None = None) -> str:
    """The access of `cluster` at another address, with another token perhaps."""
    user = {"token": token or cluster.user.token} if token or cluster.user.token else _client_certificate(cluster)
    return yaml.safe_dump(
        {
            "clusters": [{"name": "c", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "current-context": "x",
        }
    )


def _client_certificate(cluster: SingleConfig) -> dict[str, str]:
    user = cluster.user
    given = {
        "client-certificate-data": user.client_cert_data,
        "client-key-data": user.client_key_data,
        "client-certificate": str(cluster.abs_file(user.client_cert)) if user.client_cert else None,
        "client-key": str(cluster.abs_file(user.client_key)) if user.client_key else None,
    }
    return {name: value for name, value in given.items() if value}

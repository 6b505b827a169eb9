"""The Kubernetes driver with an API server in memory: refused watches, and a start that is cancelled."""

from __future__ import annotations

import asyncio

from lightkube.models.apps_v1 import DeploymentSpec
from lightkube.models.core_v1 import PodTemplateSpec
from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
from lightkube.resources.apps_v1 import Deployment

from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.kubernetes import KubernetesDriver
from osrdyne.drivers.kubernetes.api import KubernetesError
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.driver_harness import make_spec


def deployment(name, **metadata):
    spec = DeploymentSpec(selector=LabelSelector(), template=PodTemplateSpec())
    return Deployment(metadata=ObjectMeta(name=name, **metadata), spec=spec)


class ApiWithoutWatches:
    def __init__(self):
        self.listings = 0

    async def list(self, _kind, _selector):
        self.listings += 1
        return [], "1"

    async def watch(self, _kind, _selector, _version):
        raise KubernetesError("pods may not be watched", code=403)
        yield

    async def close(self):
        pass


def driver_of(api, clock, monkeypatch):
    context = DriverContext(pool="p", stack="s", clock=clock, worker_command=())
    driver = KubernetesDriver(KubernetesOptions(image="i"), context)
    monkeypatch.setattr(driver, "_api", api)
    return driver


async def test_watch_that_is_always_refused_is_tried_ever_more_rarely(monkeypatch):
    clock, api = VirtualClock(), ApiWithoutWatches()
    driver = driver_of(api, clock, monkeypatch)

    async def read():
        async for _ in driver.events():
            pass

    reading = asyncio.ensure_future(read())
    await clock.advance(300)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert 2 * 5 < api.listings < 2 * 50


class ApiThatMakesNoSecret:
    """The Deployment is made, and its Secret never is. `calls` is what was done, in order."""

    def __init__(self):
        self.calls = []
        self.making_secret, self.deleting = asyncio.Event(), asyncio.Event()

    async def apply(self, kind, manifest, **_how):
        if kind is not Deployment:
            self.making_secret.set()
            await asyncio.Event().wait()
        return deployment(manifest["metadata"]["name"], uid="the-uid")

    async def delete(self, _kind, _name, *, uid):
        self.deleting.set()
        for _ in range(10):
            await asyncio.sleep(0)
        self.calls.append(f"delete {uid}")

    async def close(self):
        self.calls.append("close")


async def test_start_that_is_cancelled_and_cancelled_again_is_undone_before_the_driver_closes(monkeypatch):
    api = ApiThatMakesNoSecret()
    driver = driver_of(api, VirtualClock(), monkeypatch)
    starting = asyncio.ensure_future(driver.start(make_spec()))
    for reached in (api.making_secret, api.deleting):
        await reached.wait()
        starting.cancel()
    await asyncio.wait([starting])
    await driver.close()
    assert api.calls == ["delete the-uid", "close"]

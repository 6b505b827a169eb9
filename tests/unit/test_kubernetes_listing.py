"""The Kubernetes driver with an API server in memory: how often a refused watch is tried, what is said of strangers."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from lightkube.models.apps_v1 import DeploymentSpec
from lightkube.models.core_v1 import PodTemplateSpec
from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
from lightkube.resources.apps_v1 import Deployment

from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.kubernetes import KubernetesDriver
from osrdyne.drivers.kubernetes.api import KubernetesError
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.testing.clock import VirtualClock


class ApiWithoutWatches:
    def __init__(self, *deployments):
        self.listings = 0
        self.deployments = deployments

    async def list(self, kind, _selector):
        self.listings += 1
        return list(self.deployments) if kind is Deployment else [], "1"

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


async def test_stranger_with_our_label_is_no_worker_and_is_told_of_once(monkeypatch):
    theirs = Deployment(
        metadata=ObjectMeta(name="theirs"),
        spec=DeploymentSpec(selector=LabelSelector(), template=PodTemplateSpec()),
    )
    driver = driver_of(ApiWithoutWatches(theirs), VirtualClock(), monkeypatch)
    said = Mock()
    monkeypatch.setattr("osrdyne.drivers.kubernetes.driver.log", said)
    assert await driver.list_instances() == []
    assert await driver.list_instances() == []
    said.warning.assert_called_once_with("object is not osrdyne's although its label says so", name="theirs")

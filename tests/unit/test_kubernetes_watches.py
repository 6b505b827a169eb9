"""The watches of the Kubernetes driver with an API server that refuses them: how often they are tried again."""

from __future__ import annotations

import asyncio

from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.kubernetes import KubernetesDriver
from osrdyne.drivers.kubernetes_api import KubernetesError
from osrdyne.drivers.kubernetes_options import KubernetesOptions
from osrdyne.testing.clock import VirtualClock


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


async def test_watch_that_is_always_refused_is_tried_ever_more_rarely(monkeypatch):
    clock, api = VirtualClock(), ApiWithoutWatches()
    context = DriverContext(pool="p", stack="s", clock=clock, worker_command=())
    driver = KubernetesDriver(KubernetesOptions(image="i"), context)
    monkeypatch.setattr(driver, "_api", api)

    async def read():
        async for _ in driver.events():
            pass

    reading = asyncio.ensure_future(read())
    await clock.advance(300)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert 2 * 5 < api.listings < 2 * 50

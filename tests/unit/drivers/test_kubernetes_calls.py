"""The Kubernetes driver with an API in memory: autoscaler objects, refused watches, a start that is cancelled."""

import asyncio

import pytest
from lightkube.models.apps_v1 import DeploymentSpec
from lightkube.models.core_v1 import PodTemplateSpec
from lightkube.models.meta_v1 import LabelSelector, ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from structlog.testing import capture_logs

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.kubernetes import KubernetesDriver
from osrdyne.drivers.kubernetes.api import KubernetesError
from osrdyne.drivers.kubernetes.check import check_cpu_request
from osrdyne.drivers.kubernetes.manifests import Manifests
from osrdyne.drivers.kubernetes.options import KubernetesOptions, Scaling
from osrdyne.drivers.kubernetes.scaling import apply_autoscaler, remove_autoscaler
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.driver_harness import make_spec

CONTEXT = DriverContext(pool="p", stack="s", clock=SystemClock(), worker_command=("w", "a:b"))
MODES = {
    Scaling.NONE: {"mode": "none"},
    Scaling.HPA: {"mode": "hpa"},
    Scaling.KEDA: {"mode": "keda", "keda": {"secret": "for-keda"}},
}


class WritingApi:
    """Has the present version of the autoscaler, and notes what is applied and deleted."""

    def __init__(self):
        self.calls = []

    async def get_json(self, path):
        return {"apis/autoscaling": {"versions": [{"version": "v2"}]}}[path]

    async def apply(self, kind, manifest, *, manager, force):
        self.calls.append(("apply", manifest["apiVersion"], manifest["kind"], manager, force))

    async def delete(self, kind, name):
        self.calls.append(("delete", kind.__name__, name))


async def apply(api, mode):
    options = KubernetesOptions(image="i", autoscaling=MODES[mode])
    spec = make_spec()
    manifests = Manifests(options, CONTEXT, spec_hash="h")
    await apply_autoscaler(api, manifests, options, spec, owner="uid")
    return f"osrdyne-{spec.worker_id}"


@pytest.mark.parametrize(
    ("mode", "made"),
    [
        (Scaling.NONE, []),
        (Scaling.HPA, [("autoscaling/v2", "HorizontalPodAutoscaler")]),
        # The credentials come before what needs them.
        (Scaling.KEDA, [("keda.sh/v1alpha1", "TriggerAuthentication"), ("keda.sh/v1alpha1", "ScaledObject")]),
    ],
    ids=str,
)
async def test_exactly_what_was_made_is_removed(mode, made):
    api = WritingApi()
    manager = await apply(api, mode)
    assert api.calls == [("apply", version, kind, manager, True) for version, kind in made]
    api.calls.clear()
    await remove_autoscaler(api, "the-name", mode)
    assert api.calls == [("delete", kind, "the-name") for _, kind in reversed(made)]


def test_autoscaler_without_a_cpu_request_is_found_by_doctor():
    given = ({}, {"requests": {"memory": "1Gi"}}, {"requests": {"cpu": "1"}}, {"limits": {"cpu": "1"}})
    findings = [check_cpu_request(KubernetesOptions(image="i", resources=resources)) for resources in given]
    assert [finding.ok for finding in findings] == [False, False, True, True]


def deployment(name, **metadata):
    spec = DeploymentSpec(selector=LabelSelector(), template=PodTemplateSpec())
    return Deployment(metadata=ObjectMeta(name=name, **metadata), spec=spec)


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


async def test_stranger_with_our_label_is_not_a_worker_and_is_reported_once(monkeypatch):
    driver = driver_of(ApiWithoutWatches(deployment("theirs")), VirtualClock(), monkeypatch)
    with capture_logs() as logs:
        assert [await driver.list_instances() for _ in range(2)] == [[], []]
    assert [(entry["log_level"], entry["name"]) for entry in logs] == [("warning", "theirs")]


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

"""Autoscaling and changed settings: who owns the number of pods, what is made, and what is left of it."""

from __future__ import annotations

import pytest
from harness import harness_for
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.autoscaling_v1 import HorizontalPodAutoscaler

from osrdyne.drivers.kubernetes_scaling import hpa_version
from osrdyne.testing.driver_harness import clean_up, eventually, make_spec

CRDS = create_namespaced_resource  # the kinds themselves are made in `keda`
KEDA = {"mode": "keda", "max_replicas": 5, "keda": {"secret": "rabbitmq-for-keda"}}


@pytest.fixture
async def harness(cluster, kubelet, namespace, tmp_path):
    async with harness_for(cluster, kubelet, namespace, tmp_path) as harness:
        yield harness


def deployment_of(admin, namespace, instance):
    return admin.get(Deployment, instance.external_id, namespace=namespace)


def owned(admin, namespace, instance, kind):
    return list(admin.list(kind, namespace=namespace, labels={"osrdyne.dev/worker": instance.worker_id}))


async def test_number_of_pods_is_the_option_without_an_autoscaler(harness, admin, namespace):
    driver = harness.make(replicas=3)
    started = await driver.start(make_spec())
    assert deployment_of(admin, namespace, started).spec.replicas == 3
    await clean_up(driver)


async def test_autoscaler_points_at_its_deployment_and_goes_with_it(harness, admin, namespace):
    driver = harness.make(autoscaling={"mode": "hpa", "min_replicas": 2, "max_replicas": 7})
    started = await driver.start(make_spec())
    [autoscaler] = owned(admin, namespace, started, HorizontalPodAutoscaler)
    assert autoscaler.spec.scaleTargetRef.name == started.external_id
    assert (autoscaler.spec.minReplicas, autoscaler.spec.maxReplicas) == (2, 7)
    assert autoscaler.spec.targetCPUUtilizationPercentage == 80
    await clean_up(driver)

    async def is_gone():
        return owned(admin, namespace, started, HorizontalPodAutoscaler) == []

    await eventually(is_gone, what="the autoscaler is gone")


async def test_best_version_of_the_autoscaler_is_found(harness):
    driver = harness.make()
    served = await driver._api.get_json("apis/autoscaling")
    known = {version["version"] for version in served["versions"]}
    found = await hpa_version(driver._api)
    assert found in known
    assert found == next(version for version in ("v2", "v2beta2", "v1") if version in known)
    await driver.close()

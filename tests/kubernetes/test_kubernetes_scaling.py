"""Autoscaling and changed settings: who owns the number of pods, what is made, and what is left of it."""

import pytest
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.autoscaling_v1 import HorizontalPodAutoscaler
from lightkube.resources.core_v1 import Pod

from osrdyne.drivers.base import InstanceId
from osrdyne.errors import StartFailedError
from osrdyne.testing.driver_harness import clean_up, eventually, make_spec

HPA = {"autoscaling": {"mode": "hpa", "max_replicas": 5}}
KEDA = {"mode": "keda", "max_replicas": 5, "keda": {"secret": "rabbitmq-for-keda"}}


@pytest.fixture
def without_keda(admin):
    """A cluster that has KEDA cannot be tested for its absence; nothing of it is taken away."""
    groups = {item.spec.group for item in admin.list(CustomResourceDefinition)}
    assert "keda.sh" not in groups, "This cluster has KEDA: run these tests on one that has not."


def deployment_of(admin, namespace, instance):
    return admin.get(Deployment, instance.external_id, namespace=namespace)


def owned(admin, namespace, instance, kind):
    return list(admin.list(kind, namespace=namespace, labels={"osrdyne.dev/worker": instance.worker_id}))


async def test_autoscaler_points_at_its_deployment_and_goes_with_it(harness, admin, namespace):
    driver = harness.make(autoscaling={"mode": "hpa", "min_replicas": 2, "max_replicas": 7})
    started = await driver.start(make_spec())
    [autoscaler] = owned(admin, namespace, started, HorizontalPodAutoscaler)
    spec = autoscaler.spec
    assert (spec.scaleTargetRef.name, spec.minReplicas, spec.maxReplicas) == (started.external_id, 2, 7)
    assert spec.targetCPUUtilizationPercentage == 80
    await clean_up(driver)

    async def is_gone():
        return owned(admin, namespace, started, HorizontalPodAutoscaler) == []

    await eventually(is_gone, what="the autoscaler is gone")


@pytest.fixture
async def changed(harness, admin, namespace):
    """Start a group with some options, and change them: gives the group as it was and as it is then."""
    drivers = []

    async def change(before, after, *, scaled_to=None):
        first, second = harness.make(**before), harness.make(**after)
        drivers.extend([first, second])
        started = await first.start(make_spec())
        if scaled_to is not None:
            scale = {"spec": {"replicas": scaled_to}}
            admin.patch(Deployment.Scale, started.external_id, scale, namespace=namespace)
        return started, await second.update(started.instance_id, make_spec())

    yield change
    await clean_up(drivers[0])
    await drivers[1].close()


async def test_update_keeps_the_instance_and_rolls_its_pods(changed, admin, namespace):
    started, updated = await changed({}, {"image": "registry.example/worker:2"})
    assert (updated.instance_id, updated.started_at) == (started.instance_id, started.started_at)
    assert updated.spec_hash != started.spec_hash

    async def only_new_pods():
        pods = owned(admin, namespace, started, Pod)
        return pods and {pod.spec.containers[0].image for pod in pods} == {"registry.example/worker:2"}

    await eventually(only_new_pods, what="all pods have the new image")


@pytest.mark.proves("reference-defects/12-failed-start-blocked")
async def test_update_does_not_change_the_number_that_the_autoscaler_has_set(changed, admin, namespace):
    started, _ = await changed(HPA, HPA | {"environment": {"NEW": "yes"}}, scaled_to=4)
    assert deployment_of(admin, namespace, started).spec.replicas == 4


@pytest.mark.parametrize(
    ("before", "after", "replicas", "autoscalers"),
    [({"replicas": 3}, HPA, 3, 1), (HPA, {"replicas": 2}, 2, 0), ({"replicas": 1}, {"replicas": 2}, 2, 0)],
    ids=["none to hpa", "hpa to none", "more pods"],
)
@pytest.mark.proves("reference-defects/12-failed-start-blocked")
async def test_change_of_mode_leaves_the_pods_and_exchanges_the_autoscaler(
    changed, admin, namespace, before, after, replicas, autoscalers
):
    started, _ = await changed(before, after)
    assert deployment_of(admin, namespace, started).spec.replicas == replicas
    assert len(owned(admin, namespace, started, HorizontalPodAutoscaler)) == autoscalers


async def test_update_of_a_group_that_is_gone_makes_no_new_one(harness):
    driver = harness.make()
    assert await driver.update(InstanceId("absent"), make_spec()) is None
    assert await driver.list_instances() == []
    await driver.close()


@pytest.mark.proves("kubernetes/daemon-lacks-right-keda")
async def test_start_without_keda_fails_reports_it_and_leaves_nothing(harness, without_keda):
    driver = harness.make(autoscaling=KEDA)
    with pytest.raises(StartFailedError, match="KEDA"):
        await driver.start(make_spec())

    async def is_empty():
        return not await driver.list_instances()

    await eventually(is_empty, what="nothing is left")
    assert [finding.subject for finding in await driver.check() if not finding.ok] == ["KEDA"]
    await driver.close()

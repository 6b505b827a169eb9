"""What the conformance suite does not ask of the Kubernetes driver: objects, failures in its words, clean-up."""

import asyncio
import json
from functools import partial

import pytest
import yaml
from lightkube.resources.apps_v1 import Deployment, ReplicaSet
from lightkube.resources.core_v1 import Pod, Secret
from lightkube.types import CascadeType, PatchType
from structlog.testing import capture_logs

from osrdyne.drivers.base import InstanceState
from osrdyne.drivers.kubernetes.api import KubernetesApi, KubernetesError
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.errors import DriverUnavailableError, StartFailedError
from osrdyne.protocol.names import Key
from osrdyne.testing.conformance_worker import Behaviour
from osrdyne.testing.driver_harness import PATIENCE, SECRET, clean_up, eventually, exited, find, is_ready, make_spec


@pytest.fixture
async def driver(harness):
    driver = harness.make()
    yield driver
    await clean_up(driver)


def objects_of(admin, namespace, instance, *kinds):
    """Names of what the API server has of one start."""
    label = {"osrdyne.dev/worker": instance.worker_id}
    return [item for kind in kinds for item in admin.list(kind, namespace=namespace, labels=label)]


async def has_served(admin, namespace, instance):
    """Wait until Kubernetes itself calls the rollout complete."""

    async def ask():
        [deployment] = objects_of(admin, namespace, instance, Deployment)
        return any(one.reason == "NewReplicaSetAvailable" for one in deployment.status.conditions or ())

    await eventually(ask, what="the rollout is complete")


async def test_nothing_is_left_of_a_group_that_ended(driver, admin, namespace):
    started = await driver.start(make_spec())
    await is_ready(driver, started)
    kinds = (Deployment, ReplicaSet, Pod, Secret)
    assert len(objects_of(admin, namespace, started, *kinds)) == 4
    await driver.stop(started.instance_id, grace=1)

    async def is_empty():
        return objects_of(admin, namespace, started, *kinds) == []

    await eventually(is_empty, what="everything of the group is gone")


async def test_deletion_never_hits_a_successor_of_the_same_name(harness, driver):
    started = await driver.start(make_spec())
    api = KubernetesApi(KubernetesOptions(image="i", kubeconfig=str(harness.kubeconfig), namespace=harness.namespace))
    await api.delete(Deployment, started.external_id, uid="that-of-a-former-one")
    await api.close()
    assert await driver.list_instances() == [started]


@pytest.mark.proves("kubernetes/pod-crashes-again-again")
async def test_image_that_cannot_be_pulled_ends_the_group_in_kubernetes_words(driver):
    started = await driver.start(make_spec(played="no-image"))
    ended = await exited(driver, started)
    assert str(ended.exit) == "ended (ImagePullBackOff: Back-off pulling image)"
    assert [line for line in await driver.logs(started.instance_id) if "ImagePullBackOff" in line]


@pytest.mark.proves("kubernetes/node-takes-pod")
async def test_group_that_no_node_takes_waits_and_reports_why_when_it_is_stopped(driver):
    started = await driver.start(make_spec(played="no-node"))

    async def events():
        return await driver.logs(started.instance_id)

    [line] = await eventually(events, what="the scheduler's words are there")
    assert line.endswith("Unschedulable: 0/3 nodes fit.")
    assert (await find(driver, started.instance_id)).state is InstanceState.RUNNING
    await driver.stop(started.instance_id, grace=1)
    assert await driver.logs(started.instance_id) == (line,)


async def test_worker_that_served_and_ended_once_is_left_to_kubernetes(driver, harness, admin, namespace):
    started = await driver.start(make_spec())
    await has_served(admin, namespace, started)
    await harness.kubelet.end_once(started.worker_id)
    assert await driver.list_instances() == [started]


async def test_deleted_deployment_is_noticed(driver, admin, namespace):
    started = await driver.start(make_spec(behaviour=Behaviour.STUBBORN))
    await is_ready(driver, started)
    admin.delete(Deployment, started.external_id, namespace=namespace, cascade=CascadeType.BACKGROUND)

    async def is_stopping():
        found = await find(driver, started.instance_id)
        return found is not None and found.state is InstanceState.STOPPING

    await eventually(is_stopping, what="the orphaned pod is listed as stopping")
    await driver.stop(started.instance_id, grace=0)
    assert (await find(driver, started.instance_id)).state is InstanceState.EXITED


async def test_option_that_kubernetes_refuses_is_named_and_leaves_nothing(harness):
    driver = harness.make(node_selector={"no label!": "x"})
    with pytest.raises(StartFailedError, match="no label!"):
        await driver.start(make_spec())
    assert await driver.list_instances() == []
    await driver.close()


async def test_kubeconfig_that_is_not_there_is_named(harness):
    driver = harness.make(kubeconfig="/nowhere/kubeconfig")
    with pytest.raises(DriverUnavailableError, match="/nowhere/kubeconfig"):
        await driver.list_instances()
    [finding] = await driver.check()
    assert not finding.ok
    await driver.close()


async def test_password_is_in_the_secret_and_nowhere_else(driver, admin, namespace):
    with capture_logs() as logs:
        started = await driver.start(make_spec())
        await is_ready(driver, started)
    seen = [item.to_dict() for item in objects_of(admin, namespace, started, Deployment, ReplicaSet, Pod)]
    assert len(seen) == 3
    assert SECRET not in json.dumps([*seen, *logs], default=str)


async def test_namespaces_side_by_side_do_not_see_each_other(driver, harness, admin):
    mine = await driver.start(make_spec())
    elsewhere = harness.make(namespace="default")
    assert await elsewhere.list_instances() == []
    theirs = await elsewhere.start(make_spec())
    assert theirs.external_id == mine.external_id
    assert await driver.list_instances() == [mine]
    await elsewhere.stop(mine.instance_id, grace=0)
    assert await driver.list_instances() == [mine]
    await clean_up(elsewhere)


@pytest.mark.proves("kubernetes/kubernetes-api-server-answer")
async def test_api_server_away_for_a_while_changes_no_pod(driver, harness, admin, namespace):
    started = await driver.start(make_spec())
    await is_ready(driver, started)
    before = objects_of(admin, namespace, started, Deployment, Pod)
    async with harness.away():
        with pytest.raises(DriverUnavailableError, match="does not answer"):
            await driver.list_instances()
    assert await driver.list_instances() == [started]
    after = objects_of(admin, namespace, started, Deployment, Pod)
    assert [item.metadata.uid for item in after] == [item.metadata.uid for item in before]


async def test_several_pods_are_one_instance_and_tell_their_logs_by_name(harness):
    driver = harness.make(replicas=2)
    started = await driver.start(make_spec(lines=1))

    async def all_lines():
        lines = await driver.logs(started.instance_id)
        return lines if len(lines) == 6 else None

    lines = await eventually(all_lines, what="both pods have written")
    assert len({line.partition(": ")[0] for line in lines}) == 2
    assert await driver.list_instances() == [started]
    await clean_up(driver)


async def test_watch_that_the_server_calls_too_old_is_an_error_of_its_own(harness, tmp_path):
    """Played, because a young API server remembers everything."""
    gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
    line = json.dumps({"type": "ERROR", "object": gone}).encode()

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + line + b"\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        access = yaml.safe_load(harness.kubeconfig.read_text())
        access["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        kubeconfig = tmp_path / "played"
        kubeconfig.write_text(yaml.safe_dump(access))
        api = KubernetesApi(KubernetesOptions(image="i", kubeconfig=str(kubeconfig)))
        with pytest.raises(KubernetesError) as refused:
            async for _ in api.watch(Pod, "a=b", "1"):
                pass
        await api.close()
    assert refused.value.code == 410


@pytest.mark.proves("kubernetes/kubernetes-api-server-answer")
async def test_events_go_on_after_a_watch_was_forgotten(driver, monkeypatch):
    forgotten = asyncio.Event()
    watch = KubernetesApi.watch

    async def forget_once(self, kind, selector, version):
        if not forgotten.is_set():
            forgotten.set()
            raise KubernetesError("too old resource version", code=410)
        async for change in watch(self, kind, selector, version):
            yield change

    monkeypatch.setattr(KubernetesApi, "watch", forget_once)
    seen = asyncio.Event()

    async def follow():
        async for _ in driver.events():
            if await driver.list_instances():
                seen.set()
                return

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        group.create_task(follow())
        await forgotten.wait()
        await driver.start(make_spec(Key("another")))
        await seen.wait()


async def test_watch_that_ends_by_a_fault_of_ours_ends_the_events(driver, monkeypatch):
    async def fail(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(KubernetesApi, "list", fail)
    with pytest.raises(RuntimeError):
        async for _ in driver.events():
            pass
    monkeypatch.undo()


async def test_pod_that_does_not_go_is_reported(driver, admin, namespace, monkeypatch):
    monkeypatch.setattr("osrdyne.drivers.kubernetes.ending._SLACK", 1.0)
    started = await driver.start(make_spec())
    await is_ready(driver, started)
    [pod] = objects_of(admin, namespace, started, Pod)
    patch = partial(admin.patch, Pod, pod.metadata.name, namespace=namespace, patch_type=PatchType.MERGE)
    patch({"metadata": {"finalizers": ["example.org/lost-node"]}})
    with pytest.raises(DriverUnavailableError, match="their node may be lost"):
        await driver.stop(started.instance_id, grace=0)
    assert (await find(driver, started.instance_id)).state is InstanceState.STOPPING
    patch({"metadata": {"finalizers": None}})

"""What listed Deployments and Pods mean."""

import pytest
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod

from osrdyne.drivers.base import Exit, InstanceState
from osrdyne.drivers.kubernetes.groups import gather, sorted_by_trouble, to_instance, trouble
from osrdyne.drivers.kubernetes.names import PoolLabels
from osrdyne.protocol.names import Key

NAMES = PoolLabels("broker:5672//", "blue")
NAME = NAMES.object_name(Key("a=b"), 2)
POD = f"{NAME}-5f4d-x"
LABELS = {"osrdyne.dev/worker": "w1", "osrdyne.dev/slot": "2", "pod-template-hash": "5f4d"}
METADATA = {
    "name": NAME,
    "uid": "u",
    "labels": LABELS,
    "annotations": {"osrdyne.dev/key-encoded": "a+3Db", "osrdyne.dev/spec-hash": "cafe"},
    "creationTimestamp": "2026-11-20T12:00:00Z",
}
ENDING = {"deletionTimestamp": "2026-11-20T13:00:00Z"}
SERVED = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
REFUSED = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
FAILED = {"terminated": {"exitCode": 3, "reason": "Error"}}
CRASH_LOOP = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
RUNNING = {"running": {}}


def deployment(*conditions, **metadata):
    spec = {"selector": {}, "template": {}}
    found = {"metadata": METADATA | metadata, "spec": spec, "status": {"conditions": list(conditions)}}
    return Deployment.from_dict(found)


def pod(state=None, *, last=None, restarts=0, ready=False, phase="Running", conditions=(), name=POD, **metadata):
    status = {"name": "worker", "image": "", "imageID": "", "ready": ready, "restartCount": restarts}
    status |= {"state": state or {}, "lastState": last or {}}
    reported = [{"type": "Ready", "status": "True" if ready else "False"}, *conditions]
    found = {"phase": phase, "conditions": reported, "containerStatuses": [status] if state else []}
    return Pod.from_dict({"metadata": METADATA | {"name": name} | metadata, "status": found})


def instance_of(deployments, pods):
    [group] = gather(deployments, pods, NAMES)
    return to_instance(group)


def test_process_is_an_instance_without_a_deployment_and_each_has_all_that_its_labels_say():
    for instance in (instance_of([deployment()], []), instance_of([], [process(RUNNING)])):
        assert (instance.instance_id, instance.worker_id, instance.slot) == ("w1", "w1", 2)
        assert (instance.key, instance.spec_hash, instance.external_id) == (Key("a=b"), "cafe", NAME)
        assert (instance.state, instance.exit, instance.started_at) == (InstanceState.RUNNING, None, 1795176000.0)
    assert instance_of([], [process(RUNNING, **ENDING)]).state is InstanceState.STOPPING


ALIVE = {
    "no pod yet": ([], []),
    "waiting for its node": ([], [pod(phase="Pending")]),
    "loading": ([], [pod(RUNNING)]),
    "ready": ([], [pod(RUNNING, ready=True)]),
    "first failure to pull": ([], [pod({"waiting": {"reason": "ErrImagePull"}})]),
    "one of two is well": ([SERVED], [pod(CRASH_LOOP, last=OOM), pod(RUNNING, ready=True)]),
    "one of two still loads": ([], [pod(CRASH_LOOP, last=OOM), pod(RUNNING)]),
    "served and started again": ([SERVED], [pod(RUNNING, last=OOM, restarts=1)]),
    "served and just ended": ([SERVED], [pod(OOM)]),
    "evicted, the next one comes": ([SERVED], [pod(FAILED, phase="Failed")]),
    "rolled, the old one goes": ([SERVED], [pod(FAILED, **ENDING), pod(RUNNING)]),
}


@pytest.mark.parametrize(("conditions", "pods"), ALIVE.values(), ids=ALIVE.keys())
def test_group_that_may_come_up_is_running(conditions, pods):
    instance = instance_of([deployment(*conditions)], pods)
    assert (instance.state, instance.exit) == (InstanceState.RUNNING, None)


DEAD = {
    "crash loop": ([SERVED], [pod(CRASH_LOOP, last=FAILED)], Exit(3, reason="CrashLoopBackOff")),
    "out of memory in a loop": ([SERVED], [pod(CRASH_LOOP, last=OOM)], Exit(137, reason="out of memory (OOMKilled)")),
    "no image": ([], [pod(NO_IMAGE)], Exit(reason="ImagePullBackOff: not found")),
    "ended before it ever served": ([], [pod(FAILED)], Exit(3)),
    "ended so, and was started again": ([], [pod(RUNNING, last=FAILED, restarts=1)], Exit(3)),
    "no pod is allowed": ([REFUSED], [], Exit(reason="FailedCreate: exceeded quota")),
    "all of them": ([], [pod(NO_IMAGE), pod(NO_IMAGE)], Exit(reason="ImagePullBackOff: not found")),
}


@pytest.mark.parametrize(("conditions", "pods", "end"), DEAD.values(), ids=DEAD.keys())
@pytest.mark.proves("kubernetes/pod-crashes-again-again")
def test_group_that_cannot_come_up_has_ended(conditions, pods, end):
    instance = instance_of([deployment(*conditions)], pods)
    assert (instance.state, instance.exit) == (InstanceState.EXITED, end)


def test_deployment_that_is_being_deleted_is_stopping_and_pods_without_theirs_are_still_an_instance():
    instance = instance_of([deployment(**ENDING)], [pod(CRASH_LOOP, last=FAILED)])
    assert (instance.state, instance.exit) == (InstanceState.STOPPING, None)
    assert instance_of([], [pod(RUNNING, **ENDING)]).state is InstanceState.STOPPING
    assert instance_of([], [pod(RUNNING, ready=True)]).state is InstanceState.RUNNING


def test_foreign_object_with_our_label_is_not_a_group():
    no_key, no_such_key = {"annotations": {}}, {"annotations": {"osrdyne.dev/key-encoded": "+GG"}}
    for broken in (no_key, no_such_key, {"labels": {"osrdyne.dev/worker": "w1"}}):
        assert gather([deployment(**broken)], [pod(RUNNING, **broken)], NAMES) == []


@pytest.mark.parametrize("name", ["mine", f"{NAME}-copy"])
def test_copy_of_a_group_and_its_pods_are_not_ours(name):
    [group] = gather([deployment(name=name), deployment()], [pod(RUNNING, name=f"{name}-5f4d-x")], NAMES)
    assert (group.name, group.pods) == (NAME, ())
    copies = [pod(RUNNING, name=f"{name}-5f4d-x"), process(RUNNING, name=f"{NAME}-copy")]
    assert gather([deployment(name=name)], copies, NAMES) == []


def test_groups_do_not_share_pods():
    name = NAMES.object_name(Key("a=b"), 0)
    labels = LABELS | {"osrdyne.dev/worker": "w2", "osrdyne.dev/slot": "0"}
    theirs = pod(RUNNING, name=f"{name}-5f4d-y", labels=labels)
    groups = gather([deployment(), deployment(name=name, labels=labels)], [pod(RUNNING), theirs, pod(RUNNING)], NAMES)
    assert {group.worker_id: len(group.pods) for group in groups} == {"w1": 2, "w2": 1}


def test_trouble_is_reported_in_the_words_of_kubernetes_and_its_pod_comes_first():
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
    a, b, c = (f"{NAME}-5f4d-{letter}" for letter in "abc")
    pods = [pod(NO_IMAGE, name=a), pod(conditions=[unschedulable], name=b), pod(RUNNING, ready=True, name=c)]
    [group] = gather([deployment(REFUSED)], pods, NAMES)
    said = ["FailedCreate: exceeded quota", f"{a}: ImagePullBackOff: not found", f"{b}: Unschedulable: 0/3 nodes fit"]
    for line, words in zip(trouble(group), said, strict=True):
        assert words in line
    pods = [pod(RUNNING, ready=True, name="a"), pod(RUNNING, name="b"), pod(CRASH_LOOP, restarts=4, name="c")]
    assert [one.metadata.name for one in sorted_by_trouble(pods)] == ["c", "b", "a"]


PROCESS = {"labels": LABELS | {"osrdyne.dev/process": "true"}}
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: memory."}


def process(state=None, **metadata):
    """The pod of a process of pooled workers, which has the name that a Deployment would have."""
    return pod(state, **({"name": NAME} | PROCESS | metadata))


@pytest.mark.parametrize(
    ("state", "phase", "end"),
    [
        (FAILED, "Failed", Exit(code=3)),
        (OOM, "Failed", Exit(code=137, reason="out of memory (OOMKilled)")),
        ({"terminated": {"exitCode": 0, "reason": "Completed"}}, "Succeeded", Exit(code=0)),
        (NO_IMAGE, "Pending", Exit(reason="ImagePullBackOff: not found")),
        (None, "Failed", Exit(reason="Evicted: The node was low on resource: memory.")),
    ],
)
@pytest.mark.proves("kubernetes/pod-pooled-process-ends")
def test_process_ends_with_its_container_or_its_node(state, phase, end):
    ended = process(state, phase=phase)
    if state is None:
        ended.status.reason, ended.status.message = EVICTED["reason"], EVICTED["message"]
    instance = instance_of([], [ended])
    assert (instance.state, instance.exit) == (InstanceState.EXITED, end)

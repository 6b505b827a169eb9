"""Workers that a platform makes of one start, a dot and a name of their own behind its id."""

from __future__ import annotations

import pytest

from osrdyne.pool.state.workers.worker_reports import WorkerRegistry, WorkerState
from osrdyne.protocol.activity import ActivityReport, Event
from osrdyne.protocol.names import Key, WorkerId, replica_id, started_as
from osrdyne.testing.clock import VirtualClock

A = Key("a")


@pytest.fixture
def registry():
    return WorkerRegistry(VirtualClock())


def tell(registry, worker_id, event, **details):
    registry.report(ActivityReport(A, event, worker_id, details))


def test_replica_leads_back_to_its_start():
    replica = replica_id(WorkerId("0123"), "pod-abc.d")
    assert (replica, started_as(replica), started_as("0123")) == ("0123.pod-abc.d", "0123", "0123")


def test_instance_serves_when_one_of_its_workers_does(registry):
    tell(registry, "w.one", Event.STARTED)
    tell(registry, "w.two", Event.READY)
    assert registry["w"].state is WorkerState.READY
    assert registry["w.one"].state is WorkerState.LOADING


def test_instance_runs_what_all_of_its_workers_run(registry):
    tell(registry, "w.one", Event.BUSY, in_flight=2)
    tell(registry, "w.two", Event.BUSY, in_flight=1)
    assert (registry["w"].worker_id, registry["w"].in_flight) == ("w", 3)


def test_other_instances_are_not_counted(registry):
    tell(registry, "w.one", Event.READY)
    assert registry["v"] is None
    assert registry.replicas("v") == []


def test_forgetting_an_instance_forgets_its_workers(registry):
    tell(registry, "w.one", Event.READY)
    tell(registry, "w.two", Event.READY)
    tell(registry, "v", Event.READY)
    registry.forget("w")
    assert [worker.worker_id for worker in registry.all()] == ["v"]


def test_forgetting_one_worker_leaves_the_others(registry):
    tell(registry, "w.one", Event.READY)
    tell(registry, "w.two", Event.READY)
    registry.forget("w.one")
    assert [worker.worker_id for worker in registry.replicas("w")] == ["w.two"]


def test_instance_that_was_assumed_ready_shows_its_workers_once_they_report(registry):
    registry.assume_ready("w", A)
    tell(registry, "w.one", Event.BUSY, in_flight=1)
    assert registry["w"].state is WorkerState.BUSY

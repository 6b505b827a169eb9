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


def test_instance_serves_when_one_of_its_workers_does_and_runs_what_all_of_them_run(registry):
    registry.assume_ready("w", A)
    assert registry["w"].state is WorkerState.READY
    tell(registry, "w.one", Event.STARTED)
    assert registry["w"].state is WorkerState.LOADING
    tell(registry, "w.two", Event.READY)
    assert (registry["w"].state, registry["w.one"].state) == (WorkerState.READY, WorkerState.LOADING)
    tell(registry, "w.one", Event.BUSY, in_flight=2)
    tell(registry, "w.two", Event.BUSY, in_flight=1)
    assert (registry["w"].worker_id, registry["w"].state, registry["w"].in_flight) == ("w", WorkerState.BUSY, 3)
    assert (registry["v"], registry.replicas("v")) == (None, [])


def test_forgetting_an_instance_forgets_its_workers(registry):
    tell(registry, "w.one", Event.READY)
    tell(registry, "w.two", Event.READY)
    tell(registry, "v", Event.READY)
    registry.forget("w.one")
    assert [worker.worker_id for worker in registry.replicas("w")] == ["w.two"]
    registry.forget("w")
    registry.forget("w")
    assert ([worker.worker_id for worker in registry.all()], registry["w"]) == (["v"], None)

"""Containers whose start was interrupted, with an engine in memory: whose slot is free, and when."""

from __future__ import annotations

import pytest

from osrdyne.drivers.base import InstanceId, InstanceState
from osrdyne.drivers.docker.containers import Containers
from osrdyne.drivers.docker.labels import Identity
from osrdyne.drivers.docker.options import BrokerUri, DockerOptions
from osrdyne.errors import DriverUnavailableError
from osrdyne.testing.driver_conformance import make_spec

OPTIONS = DockerOptions(image="worker:1", broker_uri=BrokerUri.ENV, timeout=10.0)


class EngineInMemory:
    """One container; the engine goes away in the middle of its start."""

    def __init__(self):
        self.made = {}

    def call(self, function):
        return function(self)

    def create_host_config(self, **_settings):
        return {}

    def create_container(self, _image, *, name, labels, **_settings):
        self.made["id"] = {"Id": "id", "Names": [f"/{name}"], "Labels": labels, "State": "created"}
        return {"Id": "id"}

    def start(self, _container_id):
        raise DriverUnavailableError("away")

    def containers(self, **_filters):
        return list(self.made.values())

    def inspect_container(self, container_id):
        item = self.made[container_id]
        state = {"Status": item["State"], "ExitCode": 0}
        return {"Id": "id", "Name": item["Names"][0], "Config": {"Labels": item["Labels"]}, "State": state}

    def remove_container(self, container_id, **_options):
        del self.made[container_id]


@pytest.fixture
def engine(clock):
    """With a container whose start broke off."""
    engine = EngineInMemory()
    with pytest.raises(DriverUnavailableError):
        containers_of(engine, clock).start(make_spec(), may_pull=False)
    return engine


def containers_of(engine, clock):
    return Containers(
        engine, OPTIONS, Identity("blue", "b:1//"), command=("x",), spec_hash="abc", uri_in_file=False, clock=clock
    )


def state_of(containers):
    [instance] = containers.instances(frozenset())
    return instance.state, str(instance.exit)


def test_own_start_that_broke_off_is_over_at_once(clock):
    engine = EngineInMemory()
    containers = containers_of(engine, clock)
    with pytest.raises(DriverUnavailableError):
        containers.start(make_spec(), may_pull=False)
    assert state_of(containers) == (InstanceState.EXITED, "ended (its start was interrupted)")
    containers.remove(InstanceId("id"))
    assert containers.instances(frozenset()) == []


async def test_start_of_another_leader_is_left_time(clock, engine):
    other = containers_of(engine, clock)
    assert state_of(other)[0] is InstanceState.RUNNING
    await clock.advance(29.0)
    assert state_of(other)[0] is InstanceState.RUNNING
    other.remove(InstanceId("id"))
    await clock.advance(2.0)
    assert state_of(other)[0] is InstanceState.EXITED


def test_copy_of_a_container_is_not_a_worker(engine, clock):
    engine.made["copy"] = {**engine.made["id"], "Id": "copy", "Names": ["/copy"]}
    containers = containers_of(engine, clock)
    assert [item.instance_id for item in containers.instances(frozenset())] == ["id"]
    assert containers.find(InstanceId("copy")) is None

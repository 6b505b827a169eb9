"""Finding a driver by name, its options, and what it is given."""

import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import DriverSettings, Settings
from osrdyne.config.profiles import Profile
from osrdyne.drivers import registry
from osrdyne.drivers.base import Driver, DriverContext
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.errors import ConfigurationError
from osrdyne.testing.drivers import FakeDriver

CONTEXT = DriverContext(pool="pool", stack="localhost:5672//", clock=SystemClock(), worker_command=("worker",))


@pytest.mark.parametrize(
    ("driver", "named"),
    [
        (DriverSettings(name="dokcer"), ["'dokcer'", "noop", "subprocess"]),
        (DriverSettings(name="noop", options={"colour": "red"}), ["driver.options.colour"]),
        (DriverSettings(name="systemd", options={"unit": "x"}), ["driver.options.unit", "template", "manager"]),
    ],
    ids=["unknown driver", "no options", "other options"],
)
def test_unknown_driver_or_option_is_refused_with_the_known_ones(driver, named):
    with pytest.raises(ConfigurationError) as refused:
        registry.create_driver(driver, CONTEXT)
    assert [name for name in named if name not in str(refused.value)] == []


@pytest.mark.parametrize(
    "loaded", [ImportError("no module named docker"), dict, lambda: None], ids=["import", "no driver", "no class"]
)
def test_entry_point_that_is_not_a_driver_is_refused(monkeypatch, loaded):
    fails = isinstance(loaded, Exception)
    entry_point = Mock(value="odd:thing", load=Mock(side_effect=loaded) if fails else lambda: loaded)
    entry_point.name = "odd"
    monkeypatch.setattr(registry, "entry_points", lambda **_: [entry_point])
    with pytest.raises(ConfigurationError, match="no module named docker" if fails else "odd:"):
        registry.load_driver_class("odd")


def test_stack_names_the_broker_without_credentials():
    stacks = {
        "amqp://guest:guest@localhost:5672/": "localhost:5672//",
        "amqp://other:secret@127.0.0.1": "localhost:5672//",
        "amqps://a:b@Rabbit.example/blue%2Fgreen": "rabbit.example:5671/blue/green",
        "amqp://[::1]:5673/x": "localhost:5673/x",
    }
    assert {uri: registry.stack_of(uri) for uri in stacks} == stacks


def test_worker_command_is_the_script_beside_python_or_the_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert registry.worker_command("a:b") == (str(tmp_path / "python"), "-m", "osrdyne_worker.main", "a:b")
    (tmp_path / "osrdyne-worker").touch()
    assert registry.worker_command("a:b") == (str(tmp_path / "osrdyne-worker"), "a:b")


def test_only_a_valid_kubernetes_master_has_executors_on_kubernetes():
    masters = ("k8s://https://host:6443", "k8s://", "yarn", None)
    contexts = [replace(CONTEXT, worker_config={"spark": {"master": master}}) for master in masters]
    assert [context.uses_kubernetes_executors for context in contexts] == [True, False, False, False]


def pool_driver(*profiles: dict[str, object], driver: object = "subprocess", **worker: object) -> Driver:
    settings = Settings.model_validate({"driver": driver, "worker": {"profiles": profiles, **worker}})
    return registry.create_pool_driver(settings, clock=SystemClock())


KUBERNETES = {"name": "kubernetes", "options": {"image": "i:1"}}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("noop", {}, "noop"),
        ("kubernetes", {"image": "i:1", "replicas": 2}, r"driver\.options\.replicas"),
        ("kubernetes", {"image": "i:1", "autoscaling": {"mode": "hpa"}}, r"driver\.options\.autoscaling"),
    ],
)
def test_driver_that_cannot_start_processes_is_refused(name, options, message):
    driver = {"name": name, "options": options}
    with pytest.raises(ConfigurationError, match=rf"worker\.placement: .*{message}"):
        pool_driver(driver=driver, placement="pooled")
    with pytest.raises(ConfigurationError, match=r"^worker\.profiles\.1\.placement: "):
        pool_driver({"match": "a"}, {"match": "b", "placement": "pooled"}, driver=driver)


async def test_driver_of_a_pool_has_pooled_workers_where_some_setting_asks_for_them():
    plain = [pool_driver(), pool_driver({"match": "a", "placement": "dedicated"})]
    pooled = [
        pool_driver(placement="pooled"),
        pool_driver({"match": "a", "placement": "pooled"}),
        pool_driver({"match": "a", "placement": "dedicated"}, placement="pooled"),
        pool_driver(driver=KUBERNETES, placement="pooled"),
    ]
    assert [isinstance(driver, PooledDriver) for driver in (*plain, *pooled)] == [False] * 2 + [True] * 4
    assert pooled[-1].inner.context.pooled
    for driver in (*plain, *pooled):
        await driver.close()


@pytest.mark.parametrize(("pool", "profile"), [("pooled", "dedicated"), ("dedicated", "pooled")])
def test_platform_that_counts_workers_has_one_placement_for_all_keys(pool, profile):
    with pytest.raises(ConfigurationError, match=r"^worker\.profiles\.0"):
        pool_driver({"match": "a", "placement": profile}, driver=KUBERNETES, placement=pool)


def test_driver_that_knows_no_configurations_by_key_is_refused_for_profiles_that_change_workers():
    class Former(FakeDriver):
        def spec_hash(self) -> str:  # type: ignore[override]
            return "former"

    settings = Settings.model_validate({"worker": {"profiles": [{"match": "a", "concurrency": 2}]}})
    driver = Former(SystemClock())
    found = registry.profile_obstacle(settings, settings.worker.profiles[0], driver)
    assert found is not None and "spec_hash" in found
    assert registry.profile_obstacle(settings, Profile(match="a", stop_delay=60.0), driver) is None


def test_profile_with_a_kubernetes_master_needs_a_service_account():
    driver, settings = pool_driver(driver=KUBERNETES), Settings.model_validate({"driver": KUBERNETES})
    found = registry.profile_obstacle(settings, Profile(match="a", spark_master="k8s://https://h:6443"), driver)
    assert found is not None and found.startswith("driver.options.service_account: ")


@pytest.mark.parametrize("placement", ["dedicated", "pooled"])
async def test_revision_of_the_application_changes_the_hash(placement):
    driver, profile = pool_driver(placement=placement), {"runtime": {}}
    before = [driver.spec_hash(), driver.spec_hash(profile)]
    driver.context.revision.number += 1
    assert set(before).isdisjoint([driver.spec_hash(), driver.spec_hash(profile)])
    await driver.close()

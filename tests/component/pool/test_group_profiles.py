"""Groups with profiles: their workers, delays, and which workers a change replaces, in virtual time."""

import json

import pytest

from osrdyne.config.models import LifecycleSettings, Settings
from osrdyne.errors import PoolConflictError, StartFailedError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.pool.routing.profiles import ProfileChange
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.stack import Stack, leading, settings_for

BIG, SMALL = Key("big/1"), Key("small/1")


def settings_of(*profiles: dict[str, object]) -> Settings:
    plain = settings_for(LifecycleSettings(unbind_delay=36_000.0, stop_delay=600.0))
    worker = {"profiles": profiles, "spark_conf": {"spark.ui.enabled": "false"}}
    return Settings.model_validate({**plain.model_dump(), "broker": plain.broker, "worker": worker})


@pytest.fixture
def settings():
    return settings_of()


async def require(stack: Stack, *keys: Key) -> None:
    """Each key has a ready worker."""
    for key in keys:
        stack.require(key)
        await stack.clock.settle()
        await stack.report(key, Event.READY, stack.driver.workers_of(key)[-1].spec.worker_id)


def concurrencies(driver: FakeDriver, key: Key) -> list[int]:
    return [worker.spec.environment.config["runtime"]["concurrency"] for worker in driver.workers_of(key)]


async def apply(stack: Stack, *profiles: dict[str, object]) -> ProfileChange:
    text = json.dumps({"profiles": profiles})
    changed = await stack.term.routing.profiles.change_text(text, author="me")
    assert isinstance(changed, ProfileChange)
    await stack.clock.advance(1.0)
    return changed


async def test_worker_and_group_get_the_settings_of_their_profile(clock, broker, driver):
    delays = {"match": "small/{n}", "unbind_delay": "30s", "stop_delay": "20s"}
    settings = settings_of({"match": "big/{n}", "memory": "2GiB", "concurrency": 7}, delays)
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        await require(stack, BIG, SMALL)
        [big], [small] = driver.workers_of(BIG), driver.workers_of(SMALL)
        config = big.spec.environment.config
        assert config["spark"]["conf"] == {"spark.driver.memory": "2048m", "spark.ui.enabled": "false"}
        assert config["runtime"]["concurrency"] == 7
        assert small.spec.environment.config == settings.worker_config()
        assert small.instance.spec_hash == driver.spec_hash() != big.instance.spec_hash
        await clock.advance(600.0)
        assert (stack.running(BIG), stack.running(SMALL), stack.has_queue(SMALL)) == (1, 0, False)
        assert (driver.count("start"), driver.count("stop")) == (2, 1)


async def test_next_leader_with_other_profiles_replaces_only_the_workers_that_they_change(clock, broker, driver):
    async with leading(clock, broker=broker, driver=driver, settings=settings_of({"match": "{a}/{b}"})) as stack:
        await require(stack, BIG, SMALL)
    settings = settings_of({"match": "big/{n}", "concurrency": 2}, {"match": "{a}/{b}", "stop_delay": "1h"})
    async with leading(clock, broker=broker, driver=driver, settings=settings):
        await clock.advance(5.0)
        assert concurrencies(driver, BIG) == [1, 2]
        assert len(driver.workers_of(SMALL)) == 1


async def test_change_replaces_only_the_workers_of_groups_whose_settings_change(stack):
    """The workers were started by this very leader."""
    await require(stack, BIG, SMALL)
    change = await apply(stack, {"match": "big/{n}", "concurrency": 2}, {"match": "small/{n}", "stop_delay": "1h"})
    assert (change.kept.version, change.changed) == (1, (BIG,))
    assert (concurrencies(stack.driver, BIG), concurrencies(stack.driver, SMALL)) == ([1, 2], [1])
    old, new = stack.driver.workers_of(BIG)
    await stack.report(BIG, Event.READY, new.spec.worker_id)
    stack.driver.exit_instance(old.instance.instance_id, code=0)
    await stack.clock.advance(300.0)
    assert concurrencies(stack.driver, BIG) == [2]
    assert (stack.driver.count("start"), stack.driver.count("stop")) == (3, 0)


async def test_stored_profiles_replace_those_of_the_configuration_until_they_are_cleared(clock, broker, driver):
    settings = settings_of({"match": "big/{n}", "concurrency": 3})
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        await apply(stack, {"match": "small/{n}", "concurrency": 4})
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        await require(stack, BIG, SMALL)
        assert (concurrencies(driver, BIG), concurrencies(driver, SMALL)) == ([1], [4])
        cleared = await stack.term.routing.profiles.clear(author="me")
        assert (cleared.kept.version, cleared.changed) == (2, (BIG, SMALL))
        await clock.advance(1.0)
        assert (concurrencies(driver, BIG), concurrencies(driver, SMALL)) == ([1, 3], [4, 1])
        again = await stack.term.routing.profiles.restore(1, author="me")
        assert (again.kept.version, stack.profile_of(SMALL).settings.worker.concurrency) == (3, 4)


async def test_change_that_cannot_be_used_changes_nothing(stack):
    with pytest.raises(InvalidDocumentError, match=r"profiles\.1\.stop_delay"):
        await apply(stack, {"match": "a", "concurrency": 2}, {"match": "b", "stop_delay": "1s"})
    assert await stack.term.routing.profiles.current() is None
    assert stack.profile_groups() == ()


@pytest.mark.proves("workers/stored-profile-cannot-used")
async def test_stored_profile_that_the_next_daemon_cannot_use_is_left_out(clock, broker, driver, settings):
    """Its `settle_delay` is longer than the `stop_delay` of the profile. The other profile counts."""
    async with leading(clock, broker=broker, driver=driver, settings=settings) as stack:
        await apply(stack, {"match": "big/{n}", "stop_delay": "15s"}, {"match": "small/{n}", "concurrency": 2})
    lifecycle = settings.lifecycle.model_copy(update={"settle_delay": 20.0})
    changed = settings.model_copy(update={"lifecycle": lifecycle})
    async with leading(clock, broker=broker, driver=driver, settings=changed) as stack:
        assert [problem.path for problem in stack.term.routing.profiles.left_out] == ["profiles.0.stop_delay"]
        assert stack.profile_of(BIG).profile is None
        assert stack.profile_of(SMALL).settings.worker.concurrency == 2
        with pytest.raises(PoolConflictError, match="version 1"):
            await stack.term.routing.profiles.restore(1, author="me")


@pytest.mark.proves("workers/profiles-changed-worker-group")
async def test_group_whose_start_has_failed_starts_again_with_other_settings(stack, clock):
    stack.driver.fail_next_start(StartFailedError("Spark needs more memory."))
    stack.require(BIG)
    await clock.advance(1.0)
    assert stack.driver.workers_of(BIG) == []
    await apply(stack, {"match": "big/{n}", "memory": "2GiB"})
    assert len(stack.driver.workers_of(BIG)) == 1


@pytest.mark.proves("workers/profiles-changed-worker-group")
async def test_change_while_a_worker_starts_replaces_it_afterwards(stack, clock):
    stack.driver.hang_starts()
    stack.require(BIG)
    await clock.advance(1.0)
    await apply(stack, {"match": "big/{n}", "concurrency": 2})
    stack.driver.release_starts()
    await clock.advance(1.0)
    await stack.report(BIG, Event.READY, stack.driver.workers_of(BIG)[0].spec.worker_id)
    await clock.advance(1.0)
    assert concurrencies(stack.driver, BIG) == [1, 2]

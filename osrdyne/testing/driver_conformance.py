"""The conformance suite of drivers. Source: lifecycle: start-when-slot-is-free, unique-instance-names,
stop-by-instance and `osrdyne.drivers.base`.

For the author of a driver: subclass `DriverConformance` in a test module, and give it a fixture `harness` that returns
a `DriverHarness` of your backend. `WorkerConformance` adds the tests that need running workers, `BackendConformance`
those that need a backend that can be unavailable. Needs pytest and pytest-asyncio in its automatic mode. The workers
must run `python -m osrdyne.testing.conformance_worker`.

    pytest.register_assert_rewrite("osrdyne.testing.driver_conformance")
    from osrdyne.testing.driver_conformance import DriverConformance, DriverHarness

    class TestMyDriver(DriverConformance):
        @pytest.fixture
        def harness(self, tmp_path): return MyHarness(tmp_path)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from osrdyne.drivers.base import Driver, Instance, InstanceId, InstanceState
from osrdyne.errors import DriverUnavailableError, SlotTakenError
from osrdyne.protocol.names import Key
from osrdyne.testing.conformance_worker import Behaviour
from osrdyne.testing.driver_harness import (
    AMQP_URI,
    GROUP_CONFIG,
    KEY,
    OTHER_POOL,
    PATIENCE,
    POOL,
    SECRET,
    DriverHarness,
    clean_up,
    eventually,
    exited,
    find,
    find_as_soon_as_it_answers,
    is_ready,
    is_refused,
    make_spec,
    until_events_come,
)
from osrdyne.testing.keys import ODD_KEYS

__all__ = [
    "AMQP_URI",
    "GROUP_CONFIG",
    "KEY",
    "OTHER_POOL",
    "PATIENCE",
    "POOL",
    "SECRET",
    "BackendConformance",
    "DriverConformance",
    "DriverContract",
    "DriverHarness",
    "WorkerConformance",
    "clean_up",
    "eventually",
    "exited",
    "find",
    "is_ready",
    "make_spec",
]  # fmt: skip


class DriverContract:
    """Tests of all drivers, also of one that manages no workers."""

    @pytest.fixture
    def harness(self) -> DriverHarness:
        raise NotImplementedError("Give the test class a fixture `harness`.")

    @pytest.fixture
    async def driver(self, harness: DriverHarness) -> AsyncIterator[Driver]:
        driver = harness.driver()
        yield driver
        await clean_up(driver)

    async def test_nothing_started_lists_nothing(self, driver: Driver) -> None:
        assert await driver.list_instances() == []

    async def test_stop_of_unknown_instance_is_not_an_error(self, driver: Driver) -> None:
        await driver.stop(InstanceId("unknown"), grace=0)

    async def test_remove_of_unknown_instance_is_not_an_error(self, driver: Driver) -> None:
        await driver.remove(InstanceId("unknown"))

    async def test_logs_of_unknown_instance_are_empty(self, driver: Driver) -> None:
        assert await driver.logs(InstanceId("unknown")) == ()

    async def test_check_finds_a_working_backend_fine(self, driver: Driver) -> None:
        findings = await driver.check()
        assert findings
        assert [finding for finding in findings if not finding.ok] == []

    async def test_same_settings_give_the_same_hash(self, driver: Driver, harness: DriverHarness) -> None:
        again = harness.driver()
        assert again.spec_hash() == driver.spec_hash() != ""
        await again.close()


class DriverConformance(DriverContract):
    """Tests of drivers that manage workers."""

    async def test_started_worker_is_listed_as_it_was_asked_for(self, driver: Driver) -> None:
        spec = make_spec(slot=2)
        started = await driver.start(spec)
        [listed] = await driver.list_instances()
        assert listed == started
        assert (listed.key, listed.slot, listed.worker_id) == (spec.key, spec.slot, spec.worker_id)
        assert (listed.state, listed.exit) == (InstanceState.RUNNING, None)

    async def test_listed_worker_carries_the_hash_it_was_started_with(self, driver: Driver) -> None:
        instance = await driver.start(make_spec())
        assert instance.spec_hash == driver.spec_hash()

    async def test_worker_of_a_group_with_a_profile_carries_the_hash_of_its_settings(self, driver: Driver) -> None:
        spec_hash = driver.spec_hash(GROUP_CONFIG)
        assert spec_hash == driver.spec_hash(GROUP_CONFIG) != driver.spec_hash()
        started = await driver.start(make_spec(spec_hash=spec_hash))
        assert [started.spec_hash, *(one.spec_hash for one in await driver.list_instances())] == [spec_hash] * 2

    async def test_changed_settings_shape_new_workers_and_leave_the_others_alone(
        self, driver: Driver, harness: DriverHarness
    ) -> None:
        before = await driver.start(make_spec())
        changed = harness.changed_driver()
        after = await changed.start(make_spec(slot=1))
        listed = {item.slot: item for item in await changed.list_instances()}
        await changed.close()
        assert after.spec_hash != before.spec_hash
        assert listed == {0: before, 1: after}

    async def test_second_start_of_a_slot_is_refused(self, driver: Driver) -> None:
        first = await driver.start(make_spec())
        with pytest.raises(SlotTakenError):
            await driver.start(make_spec())
        assert await driver.list_instances() == [first]

    async def test_starts_of_a_slot_at_once_give_one_worker(self, driver: Driver, harness: DriverHarness) -> None:
        rival = harness.driver()

        async def start(starter: Driver) -> Instance:
            while True:
                try:
                    return await starter.start(make_spec())
                except DriverUnavailableError:  # the other driver uses the backend; callers try again
                    await asyncio.sleep(0.1)

        results = await asyncio.gather(
            *(start(starter) for starter in (driver, rival, driver, rival)), return_exceptions=True
        )
        await rival.close()
        started = [result for result in results if isinstance(result, Instance)]
        refused = [result for result in results if isinstance(result, SlotTakenError)]
        assert (len(started), len(refused)) == (1, 3)
        assert [item.instance_id for item in await driver.list_instances()] == [started[0].instance_id]

    async def test_slots_of_a_key_are_workers_of_their_own(self, driver: Driver) -> None:
        started = [await driver.start(make_spec(slot=slot)) for slot in range(2)]
        assert {item.instance_id for item in await driver.list_instances()} == {item.instance_id for item in started}

    async def test_restarted_controller_finds_the_same_instances(self, harness: DriverHarness, driver: Driver) -> None:
        earlier = harness.driver()
        started = await earlier.start(make_spec())
        await is_ready(earlier, started)
        await earlier.close()
        assert await driver.list_instances() == [started]
        await is_ready(driver, started)

    async def test_restarted_controller_still_finds_the_slot_taken(
        self, harness: DriverHarness, driver: Driver
    ) -> None:
        earlier = harness.driver()
        await earlier.start(make_spec())
        await earlier.close()
        with pytest.raises(SlotTakenError):
            await driver.start(make_spec())

    async def test_restarted_controller_sees_what_exited_meanwhile(
        self, harness: DriverHarness, driver: Driver
    ) -> None:
        earlier = harness.driver()
        started = await earlier.start(make_spec())
        await is_ready(earlier, started)
        await earlier.close()
        await harness.kill(started)
        ended = await exited(driver, started)
        assert ended.exit is not None

    async def test_restarted_controller_can_stop_what_it_found(self, harness: DriverHarness, driver: Driver) -> None:
        earlier = harness.driver()
        started = await earlier.start(make_spec())
        await is_ready(earlier, started)
        await earlier.close()
        await driver.stop(started.instance_id, grace=PATIENCE)
        assert (await exited(driver, started)).instance_id == started.instance_id

    async def test_end_that_no_controller_saw_is_found_by_the_next_one(
        self, harness: DriverHarness, driver: Driver
    ) -> None:
        earlier = harness.driver()
        started = await earlier.start(make_spec())
        await is_ready(earlier, started)
        await earlier.close()
        await harness.kill(started)
        assert (await exited(driver, started)).instance_id == started.instance_id

    async def test_worker_that_exits_at_once_is_listed_with_its_code_and_last_lines(self, driver: Driver) -> None:
        started = await driver.start(make_spec(behaviour=Behaviour.EXIT, code=7, lines=3))
        ended = await exited(driver, started)
        assert ended.exit is not None
        assert ended.exit.code == 7
        assert await driver.logs(ended.instance_id, lines=3) == ("line 1", "line 2", "ready")

    async def test_exited_worker_keeps_its_slot_until_removed(self, driver: Driver) -> None:
        ended = await exited(driver, await driver.start(make_spec(behaviour=Behaviour.EXIT)))
        with pytest.raises(SlotTakenError):
            await driver.start(make_spec())
        await driver.remove(ended.instance_id)
        assert await driver.list_instances() == []
        again = await driver.start(make_spec())
        assert again.instance_id != ended.instance_id

    async def test_remove_leaves_a_running_worker_alone(self, driver: Driver) -> None:
        started = await driver.start(make_spec())
        await driver.remove(started.instance_id)
        assert await driver.list_instances() == [started]

    async def test_stopped_worker_is_gone_when_stop_returns(self, driver: Driver) -> None:
        started = await driver.start(make_spec())
        await is_ready(driver, started)
        await driver.stop(started.instance_id, grace=PATIENCE)
        stopped = await find(driver, started.instance_id)
        assert stopped is not None
        assert stopped.state is InstanceState.EXITED
        assert stopped.exit is not None
        assert stopped.exit.code == 0

    async def test_stop_may_be_repeated(self, driver: Driver) -> None:
        started = await driver.start(make_spec())
        await is_ready(driver, started)
        await asyncio.gather(*(driver.stop(started.instance_id, grace=PATIENCE) for _ in range(3)))
        await driver.stop(started.instance_id, grace=PATIENCE)
        assert (await exited(driver, started)).exit is not None

    async def test_stop_touches_no_other_worker(self, driver: Driver) -> None:
        stopped, other = [await driver.start(make_spec(slot=slot)) for slot in range(2)]
        await driver.stop(stopped.instance_id, grace=0)
        assert await find(driver, other.instance_id) == other

    async def test_stop_kills_what_does_not_listen(self, driver: Driver) -> None:
        started = await driver.start(make_spec(behaviour=Behaviour.STUBBORN))
        await is_ready(driver, started)
        await driver.stop(started.instance_id, grace=0.2)
        stopped = await find(driver, started.instance_id)
        assert stopped is not None
        assert stopped.exit is not None
        assert stopped.exit.signal == "SIGKILL" or stopped.exit.code == 128 + 9

    async def test_worker_being_stopped_is_listed_so(self, driver: Driver, harness: DriverHarness) -> None:
        started = await driver.start(make_spec(behaviour=Behaviour.STUBBORN))
        await is_ready(driver, started)

        async def is_stopping() -> bool:
            found = await find(driver, started.instance_id)
            return found is not None and found.state is InstanceState.STOPPING

        async with asyncio.TaskGroup() as group:
            group.create_task(driver.stop(started.instance_id, grace=PATIENCE), name="stop")
            await eventually(is_stopping, what="the worker is listed as stopping")
            await harness.kill(started)  # otherwise the stop would take `PATIENCE` seconds

    async def test_worker_killed_from_outside_is_seen_through_events(
        self, driver: Driver, harness: DriverHarness
    ) -> None:
        started = await driver.start(make_spec())
        await is_ready(driver, started)

        listening = asyncio.Event()

        async def watch() -> None:
            async for _ in driver.events():
                listening.set()
                found = await find(driver, started.instance_id)
                if found is not None and found.state is InstanceState.EXITED:
                    return

        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            group.create_task(watch(), name="watch")
            await until_events_come(driver, listening, first_slot=1)
            await harness.kill(started)

    async def test_every_odd_key_has_a_worker_of_its_own(self, driver: Driver) -> None:
        await asyncio.gather(*(driver.start(make_spec(key)) for key in ODD_KEYS.values()))
        listed = await driver.list_instances()
        assert sorted(item.key for item in listed) == sorted(ODD_KEYS.values())
        assert len({item.instance_id for item in listed}) == len(ODD_KEYS)

    async def test_pools_side_by_side_do_not_see_each_other(self, driver: Driver, harness: DriverHarness) -> None:
        other = harness.driver(OTHER_POOL)
        mine = await driver.start(make_spec())
        theirs = await other.start(make_spec(pool=OTHER_POOL))
        assert await driver.list_instances() == [mine]
        assert await other.list_instances() == [theirs]
        await driver.stop(theirs.instance_id, grace=0)
        assert await other.list_instances() == [theirs]
        await clean_up(other)

    async def test_fifty_starts_at_once_give_fifty_workers(self, driver: Driver) -> None:
        started = await asyncio.gather(*(driver.start(make_spec(Key(f"key {number}"))) for number in range(50)))
        listed = await driver.list_instances()
        assert {item.instance_id for item in listed} == {item.instance_id for item in started}
        assert len(listed) == 50

    async def test_logs_are_the_last_lines(self, driver: Driver) -> None:
        started = await driver.start(make_spec(lines=100))
        await is_ready(driver, started)
        assert await driver.logs(started.instance_id, lines=2) == ("line 99", "ready")
        assert await driver.logs(started.instance_id, lines=0) == ()


class WorkerConformance(DriverConformance):
    """Tests of drivers whose workers really run."""

    async def test_worker_gets_its_environment(self, driver: Driver) -> None:
        spec = make_spec(note="a 'quoted' $note\n漢")
        spec = replace(spec, environment=replace(spec.environment, paused=True))
        said = await is_ready(driver, await driver.start(spec))
        assert (said["worker_id"], said["key"], said["pool"]) == (spec.worker_id, spec.key, spec.pool)
        assert said["queue"] == spec.environment.requests_queue
        assert said["config"] == spec.environment.config
        assert said["paused"] is True
        assert said["uri_sha256"] == hashlib.sha256(AMQP_URI.encode()).hexdigest()

    async def test_odd_keys_reach_their_workers_unchanged(self, driver: Driver) -> None:
        for key in ODD_KEYS.values():
            started = await driver.start(make_spec(key))
            assert (await is_ready(driver, started))["key"] == key
            await driver.stop(started.instance_id, grace=0)

    async def test_password_is_not_on_the_command_line(self, driver: Driver) -> None:
        said = await is_ready(driver, await driver.start(make_spec()))
        assert SECRET not in json.dumps(said["arguments"])

    async def test_worker_that_never_becomes_ready_is_listed_and_can_be_stopped(self, driver: Driver) -> None:
        started = await driver.start(make_spec(behaviour=Behaviour.SILENT))

        async def has_begun() -> bool:
            return bool(await driver.logs(started.instance_id))

        await eventually(has_begun, what="the worker has begun")
        assert await driver.list_instances() == [started]
        await driver.stop(started.instance_id, grace=PATIENCE)
        assert (await exited(driver, started)).exit is not None

    async def test_worker_with_a_job_running_finishes_it_within_the_grace(self, driver: Driver) -> None:
        started = await driver.start(make_spec(behaviour=Behaviour.BUSY))
        await is_ready(driver, started)
        await driver.stop(started.instance_id, grace=PATIENCE)
        stopped = await exited(driver, started)
        assert stopped.exit is not None
        assert stopped.exit.code == 0
        assert await driver.logs(started.instance_id, lines=1) == ("job finished",)


class BackendConformance:
    """Tests with a backend that does not answer for a while; used together with one of the classes above.

    The backend is an engine, a bus or an API server. If the host itself is the backend, as for `subprocess`, the
    directory of the driver is made unavailable instead, as a full or lost disk would.
    """

    async def test_every_call_reports_that_the_backend_is_away(self, driver: Driver, harness: DriverHarness) -> None:
        started = await driver.start(make_spec())
        await is_ready(driver, started)
        async with harness.away():
            for call in (
                driver.list_instances(),
                driver.start(make_spec(slot=1)),
                driver.stop(started.instance_id, grace=0),
                driver.remove(started.instance_id),
                driver.logs(started.instance_id),
            ):
                with pytest.raises(DriverUnavailableError):
                    await call
            assert [finding for finding in await driver.check() if not finding.ok] != []
        await driver.stop(started.instance_id, grace=PATIENCE)
        stopped = await exited(driver, started)
        assert stopped.exit is not None
        assert stopped.exit.code == 0

    async def test_backend_away_for_a_while_costs_no_worker_and_hides_no_end(
        self, driver: Driver, harness: DriverHarness
    ) -> None:
        """The driver is called all the time, as by the pool, which also repeats a listing that fails after an event."""
        stays, ends = [await driver.start(make_spec(slot=slot)) for slot in range(2)]
        for worker in (stays, ends):
            await is_ready(driver, worker)
        listening = asyncio.Event()

        async def watch() -> None:
            async for _ in driver.events():
                listening.set()
                found = await find_as_soon_as_it_answers(driver, ends.instance_id)
                if found is not None and found.state is InstanceState.EXITED:
                    return

        async with asyncio.timeout(2 * (PATIENCE + harness.absence)), asyncio.TaskGroup() as group:
            group.create_task(watch(), name="watch")
            free_slot = await until_events_come(driver, listening, first_slot=2)
            async with harness.away():
                await harness.kill(ends)
                await is_refused(driver, seconds=harness.absence)
        assert await find(driver, stays.instance_id) == stays
        await driver.start(make_spec(slot=free_slot))

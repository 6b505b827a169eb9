"""Pooled workers with a real daemon, RabbitMQ and processes: many keys share one, and faults lose nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon_process import PATIENCE, DaemonProcess, MakeDaemon, merged, until
from durable_caller import DurableCaller, durable_caller

from osrdyne.broker.management.client import ManagementClient
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.pooled import PROCESS_KEY

WORKER = [str(Path(sys.executable).with_name("osrdyne-worker")), "workers.examples.echo:app"]
KEYS = [f"key {number}" for number in range(20)]


def pooled(make_daemon: MakeDaemon, *, spares: int = 0, pool: str | None = None, **settings: Any) -> DaemonProcess:
    base = {
        "driver": {"options": {"command": WORKER}},
        # The memory of the machine that runs the tests must not decide how many processes there are.
        "worker": {
            "placement": "pooled",
            "pooled": {"spares": spares, "process_timeout": "20s", "max_memory_used": None},
        },
        "lifecycle": {"start_attempts": 3, "max_concurrent_starts": 8},
    }
    return make_daemon(pool=pool, **merged(base, settings))


def process_pids(daemon: DaemonProcess) -> list[int]:
    return daemon.pids(PROCESS_KEY)


async def processes(daemon: DaemonProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await daemon.get("/v1/processes")).get("processes", [])
    return found


@pytest.mark.nightly
async def test_twenty_keys_share_one_process(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = pooled(make_daemon)
    await daemon.start()
    infos = await asyncio.gather(*map(caller.info, KEYS))
    assert [{info["pid"] for info in infos}] == [set(process_pids(daemon))]
    assert len({info["worker_id"] for info in infos}) == len(KEYS)
    [process] = await processes(daemon)
    assert (process["state"], process["keys"], process["external_id"]) == (
        "ready",
        sorted(KEYS),
        str(infos[0]["pid"]),
    )
    listed = daemon.osrdyne("workers", "list")
    assert listed.returncode == 0, listed.stderr
    assert process["worker_id"] in listed.stdout
    shown = daemon.osrdyne("groups", "show", KEYS[0])
    assert process["worker_id"] in shown.stdout, shown.stderr
    shown = daemon.osrdyne("workers", "show", process["worker_id"][:8])
    assert KEYS[0] in shown.stdout, shown.stderr


@pytest.mark.nightly
async def test_spare_process_is_up_before_the_first_request(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = pooled(make_daemon, spares=1)
    await daemon.start()

    async def is_spare() -> bool:
        return [process["state"] for process in await processes(daemon)] == ["spare"]

    await until(is_spare, "a spare process is ready")
    [spare] = process_pids(daemon)
    assert (await caller.info("k"))["pid"] == spare
    await until(lambda: len(process_pids(daemon)) == 2, "another spare is started")


@pytest.mark.nightly
async def test_idle_key_is_released_and_the_others_stay(
    make_daemon: MakeDaemon, caller: DurableCaller, management: ManagementClient
) -> None:
    daemon = pooled(make_daemon, lifecycle={"unbind_delay": "1s", "extra_lifetime": "100ms"})
    await daemon.start()
    await daemon.post("/v1/group/pin", key="stays")
    stays, idle = await caller.info("stays"), await caller.info("idle")
    assert stays["pid"] == idle["pid"]
    await daemon.until_gone("idle")
    queue = PoolNames(daemon.pool).request_queue(Key("idle"))
    assert [one.name for one in await management.list_queues(queue)] == []
    assert [process["keys"] for process in await processes(daemon)] == [["stays"]]
    again = await caller.info("idle")
    assert again["worker_id"] != idle["worker_id"]
    assert again["pid"] == stays["pid"] == (await caller.info("stays"))["pid"]


async def test_process_killed_under_load_loses_nothing(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = pooled(make_daemon)
    await daemon.start()
    await asyncio.gather(*map(caller.info, KEYS))
    for _ in range(3):
        await asyncio.gather(*(caller.send(key, "/sleep", {"seconds": 0.5}) for key in KEYS for _ in range(2)))
        before = process_pids(daemon)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda before=before: not set(before) & set(process_pids(daemon)), "the process is gone")
    await caller.until_all_answered()
    assert caller.statuses() == {"ok"}
    assert (await daemon.get("/v1/poison"))["total"] == 0


@pytest.mark.nightly
async def test_processes_are_recycled_under_load_without_a_gap(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    """Each key has its successor in another process before its process ends, and no request is interrupted."""
    daemon = pooled(make_daemon, worker={"pooled": {"max_requests": 40}})
    await daemon.start()
    keys = KEYS[:4]
    pids: dict[str, set[object]] = {key: set() for key in keys}

    async def load(key: str) -> None:
        while len(pids[key]) < 3:
            slow = await caller.send(key, "/sleep", {"seconds": 0.2})
            pids[key].add((await caller.info(key))["pid"])
            assert (await caller.answer(slow)).status == "ok"

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*map(load, keys))
    await caller.until_all_answered()
    assert caller.statuses() == {"ok"}
    assert daemon.events("process is replaced")
    assert daemon.events("worker ended", component="worker_actions") == []


@pytest.mark.nightly
@pytest.mark.proves("pooled/request-ends-each-process")
async def test_leader_killed_between_two_deaths_blames_no_innocent_key(
    make_daemon: MakeDaemon, caller: DurableCaller
) -> None:
    """A request ends each process in which it runs. The daemon that has seen the first end is killed."""
    daemon = pooled(make_daemon)
    await daemon.start()
    innocent = KEYS[:6]
    await asyncio.gather(*map(caller.info, [*innocent, "culprit"]))
    for key in innocent:
        await caller.send(key, "/sleep", {"seconds": 2.0})
    [pid] = process_pids(daemon)
    crash = await caller.send("culprit", "/crash", {})
    await until(lambda: pid not in process_pids(daemon), "the first process is gone")
    daemon.kill()
    await daemon.start()
    await caller.until_all_answered()
    assert caller.statuses([one for one in caller.confirmed if one != crash]) == {"ok"}
    assert caller.statuses([crash]) == {"poison"}
    entries = (await daemon.get("/v1/poison"))["entries"]
    assert {entry["key"] for entry in entries} == {"culprit"}
    await asyncio.gather(*map(caller.info, innocent))


@pytest.mark.nightly
async def test_process_with_a_hundred_keys_is_killed_and_none_is_blamed(
    make_daemon: MakeDaemon, caller: DurableCaller
) -> None:
    keys = [f"key {number}" for number in range(100)]
    # One process for all of them: it is the spare before the first key comes, and so is its successor.
    daemon = pooled(make_daemon, spares=1, worker={"pooled": {"keys_per_process": len(keys), "max_processes": 1}})
    await daemon.start()
    await asyncio.gather(*map(caller.info, keys))
    [before] = process_pids(daemon)
    await asyncio.gather(*(caller.send(key, "/sleep", {"seconds": 0.2}) for key in keys for _ in range(2)))
    os.kill(before, signal.SIGKILL)
    await caller.until_all_answered()
    assert caller.statuses() == {"ok"}
    assert (await daemon.get("/v1/poison"))["total"] == 0
    [process] = await processes(daemon)
    assert (process["keys"], process["alone"]) == (sorted(keys), None)
    assert process_pids(daemon) != [before]


@pytest.mark.nightly
async def test_stopped_process_is_killed_and_its_keys_answer(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = pooled(make_daemon, worker={"pooled": {"process_timeout": "6s"}})
    await daemon.start()
    await asyncio.gather(*map(caller.info, KEYS[:5]))
    [pid] = process_pids(daemon)
    os.kill(pid, signal.SIGSTOP)
    for key in KEYS[:5]:
        await caller.send(key)
    await caller.until_all_answered()
    assert caller.statuses() == {"ok"}
    assert pid not in process_pids(daemon)


STEPS: dict[str, dict[str, object]] = {
    "process started": {},
    "worker is assigned": {"key": "k"},
    "worker started": {"key": "k"},
    "request queue changed": {"key": "k", "step": "unbind"},
    "worker is released": {"key": "k"},
    "worker is forgotten": {"key": "k"},
    "request queue deleted": {"key": "k"},
}
"""What a daemon logs while a worker is assigned and released, in this order."""


async def kill_at(daemon: DaemonProcess, event: str, fields: dict[str, object]) -> None:
    """Kill the daemon at this step, with requests coming in, and start it again."""
    async with durable_caller(daemon.amqp_uri, daemon.pool) as caller:
        await daemon.start()
        await caller.send("other")
        await caller.send("k")
        await daemon.until_event(event, **fields)
        daemon.kill()
        for key in ("k", "other", "new"):
            await caller.send(key)
        await daemon.start()
        await caller.until_all_answered()
        assert caller.statuses() == {"ok"}, event
        assert len(process_pids(daemon)) == 1, event


async def test_daemons_killed_at_each_step_of_assign_and_release_lose_nothing(
    make_daemon: MakeDaemon, pool_id: str
) -> None:
    """Each step in a pool of its own, side by side."""
    ending = {"unbind_delay": "1s", "extra_lifetime": "100ms"}
    async with asyncio.TaskGroup() as group:
        for number, (event, fields) in enumerate(STEPS.items()):
            daemon = pooled(make_daemon, pool=f"{pool_id}_{number}", lifecycle=ending)
            group.create_task(kill_at(daemon, event, fields))


@pytest.mark.nightly
async def test_change_of_placement_replaces_workers(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon(driver={"options": {"command": WORKER}})
    await daemon.start()
    dedicated = await caller.info("k")
    assert await daemon.stop() == 0
    daemon.write_settings(worker={"placement": "pooled", "pooled": {"spares": 0}})
    await daemon.start()
    await until(lambda: daemon.pids("k") == [], "the dedicated worker has ended")
    assert (await caller.info("k"))["pid"] == process_pids(daemon)[0] != dedicated["pid"]
    assert await daemon.stop() == 0
    daemon.write_settings(worker={"placement": "dedicated"})
    await daemon.start()
    await until(lambda: process_pids(daemon) == [], "the process has ended")
    assert (await caller.info("k"))["pid"] == daemon.pids("k")[0]


@pytest.mark.nightly
async def test_stop_with_workers_ends_the_processes(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = pooled(make_daemon, spares=1)
    await daemon.start("--stop-workers")
    await caller.info("k")
    assert await daemon.stop() == 0
    assert daemon.workers() == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"driver": {"name": "noop", "options": {}}}, "starts no processes"),
        ({"worker": {"environment": "reference"}}, "workers of the reference"),
    ],
)
async def test_placement_that_cannot_work_is_refused(
    make_daemon: MakeDaemon, settings: dict[str, Any], expected: str
) -> None:
    daemon = pooled(make_daemon, **settings)
    if "driver" in settings:
        daemon.settings = {**daemon.settings, "driver": settings["driver"]}
        daemon.write_settings()
    checked = daemon.osrdyne("check-config")
    assert checked.returncode == 2, checked.stdout
    assert "worker.placement: " in checked.stderr
    assert expected in checked.stderr


@pytest.mark.nightly
async def test_application_that_is_not_poolable_is_refused(make_daemon: MakeDaemon) -> None:
    daemon = pooled(make_daemon, worker={"app": "tests.integration.flaky_app:app"})
    daemon.settings = {**daemon.settings, "driver": {"name": "subprocess", "options": {}}}
    daemon.write_settings()
    daemon.variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    checked = daemon.osrdyne("check-config")
    assert (checked.returncode, "not poolable" in checked.stderr) == (2, True), checked.stderr

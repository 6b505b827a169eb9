"""An idle group goes away in order; a request wakes it at any step, and work is never stopped for being idle."""

import asyncio

import pytest
from daemon_process import DaemonProcess
from durable_caller import DurableCaller

from osrdyne.broker.management.client import ManagementClient
from osrdyne.protocol.names import Key, PoolNames

SHORT = {"unbind_delay": "1s", "extra_lifetime": "100ms"}


async def queue_exists(management: ManagementClient, daemon: DaemonProcess, key: str) -> bool:
    name = PoolNames(daemon.pool).request_queue(Key(key))
    return any(queue.name == name for queue in await management.list_queues(name))


async def goes_and_comes_back(daemon: DaemonProcess, caller: DurableCaller, management: ManagementClient) -> None:
    first = await caller.info("idle")
    unbound = await daemon.until_event("request queue changed", key="idle", step="unbind")
    stopping = await daemon.until_event("worker stopping", key="idle")
    deleted = await daemon.until_event("request queue deleted", key="idle")
    assert unbound["timestamp"] < stopping["timestamp"] < deleted["timestamp"]
    await daemon.until_gone("idle")
    assert daemon.pids("idle") == []
    assert not await queue_exists(management, daemon, "idle")
    assert (await caller.info("idle"))["pid"] != first["pid"]


async def is_asked_while_its_worker_stops(daemon: DaemonProcess, caller: DurableCaller) -> None:
    first = await caller.info("late")
    await daemon.until_event("worker stopping", key="late")
    assert (await caller.info("late"))["pid"] != first["pid"]


async def works_longer_than_all_delays(daemon: DaemonProcess, caller: DurableCaller, path: str) -> None:
    pid = (await caller.info(path))["pid"]
    answer = await caller.call(path, path, {"seconds": 16})
    assert answer.status == "ok"
    assert daemon.pids(path) == [pid]
    assert not daemon.events("worker stopping", key=path)


@pytest.mark.proves("reference-defects/8-steady-use-unbound", "workers/job-runs-longer-both")
async def test_groups_without_work_go_and_groups_at_work_stay(make_daemon, caller, management):
    """Four keys side by side: one goes, one is asked at the moment it goes, two work all the time."""
    daemon = make_daemon(lifecycle=SHORT)
    await daemon.start()
    async with daemon.watching_for_twins(), asyncio.TaskGroup() as group:
        group.create_task(goes_and_comes_back(daemon, caller, management))
        group.create_task(is_asked_while_its_worker_stops(daemon, caller))
        group.create_task(works_longer_than_all_delays(daemon, caller, "/sleep"))
        group.create_task(works_longer_than_all_delays(daemon, caller, "/sleep_thread"))

"""kill -9 of the daemon at any time: no confirmed request is lost, workers go on, no key gets a second one.

And of a process that many keys share.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest
from daemon_process import WORKER, DaemonProcess, merged, until
from durable_caller import DurableCaller, durable_caller

from osrdyne.protocol.pooled import PROCESS_KEY

KEYS = ("infra=42,timetable=24", "a", "b")
Moment = Callable[[DaemonProcess, DurableCaller], Awaitable[object]]


async def burst(caller: DurableCaller, path: str = "/info", body: object = None) -> None:
    """Confirmed requests for every key."""
    await asyncio.gather(*(caller.send(key, path, body) for key in KEYS for _ in range(4)))


async def right_after_a_burst(daemon: DaemonProcess, caller: DurableCaller) -> None:
    await burst(caller)


async def while_requests_run(daemon: DaemonProcess, caller: DurableCaller) -> None:
    await asyncio.gather(*map(caller.info, KEYS))
    await burst(caller, "/sleep", {"seconds": 0.7})


@pytest.mark.parametrize(
    "moment", [right_after_a_burst, while_requests_run], ids=lambda moment: getattr(moment, "__name__", None)
)
@pytest.mark.proves("controller/leader-killed")
async def test_daemon_killed_under_load_loses_nothing(make_daemon, caller, moment):
    daemon = make_daemon()
    await daemon.start()
    async with daemon.watching_for_twins():
        await moment(daemon, caller)
        daemon.kill()
        running = {worker.key: worker.pid for worker in daemon.workers()}
        await burst(caller)
        await caller.send("new")
        await daemon.start()
        await caller.until_all_answered()
        infos = {key: await caller.info(key) for key in KEYS}
    assert caller.statuses() == {"ok"}
    assert {key: infos[key]["pid"] for key in running} == running


@pytest.mark.proves("controller/daemon-runs")
async def test_while_no_daemon_runs_workers_answer_and_other_requests_expire(make_daemon, caller):
    daemon = make_daemon()
    await daemon.start()
    pid = (await caller.info("k"))["pid"]
    daemon.kill()
    assert (await caller.info("k"))["pid"] == pid
    late = await caller.send("other", expiration=0.2)
    await daemon.start()
    assert (await caller.answer(late)).status == "expired"
    assert daemon.pids("other") == []


POOLED: dict[str, Any] = {
    "driver": {"options": {"command": [WORKER, "workers.examples.echo:app"]}},
    # The memory of the machine that runs the tests must not decide how many processes there are.
    "worker": {"placement": "pooled", "pooled": {"spares": 0, "process_timeout": "20s", "max_memory_used": None}},
    "lifecycle": {"start_attempts": 3, "max_concurrent_starts": 8},
}


async def test_process_killed_under_load_loses_nothing(make_daemon, caller):
    daemon, keys = make_daemon(**POOLED), [f"key {number}" for number in range(20)]
    await daemon.start()
    infos = await asyncio.gather(*map(caller.info, keys))
    assert {info["pid"] for info in infos} == set(daemon.pids(PROCESS_KEY))
    [process] = (await daemon.get("/v1/processes"))["processes"]
    assert (process["state"], process["keys"]) == ("ready", sorted(keys))
    for _ in range(3):
        await asyncio.gather(*(caller.send(key, "/sleep", {"seconds": 0.5}) for key in keys for _ in range(2)))
        before = daemon.pids(PROCESS_KEY)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda before=before: not set(before) & set(daemon.pids(PROCESS_KEY)), "the process is gone")
    await caller.until_all_answered()
    assert caller.statuses() == {"ok"}
    assert (await daemon.get("/v1/poison"))["total"] == 0


STEPS: dict[str, dict[str, dict[str, str]]] = {
    "k": {"request queue changed": {"step": "unbind"}, "worker stopping": {}, "worker ended": {}},
    PROCESS_KEY: {"worker is assigned": {}, "worker is released": {}},
}
"""What a daemon logs while a group ends, or its worker begins or ends in a process that it shares; the steps between
them are those of the component tests."""


async def kill_at(daemon: DaemonProcess, event: str, fields: dict[str, str], process: str) -> None:
    """Kill the daemon at this step, with requests coming in, and start it again."""
    async with durable_caller(daemon.amqp_uri, daemon.pool) as caller:
        await daemon.start()
        await caller.send("other")
        await caller.send("k")
        async with daemon.watching_for_twins() if process == "k" else nullcontext():
            await daemon.until_event(event, key="k", **fields)
            daemon.kill()
            for key in ("k", "k", "other", "new"):
                await caller.send(key)
            await daemon.start()
            await caller.until_all_answered()
        assert caller.statuses() == {"ok"}, event
        assert len(daemon.pids(process)) <= 1, event  # the group may have ended again


@pytest.mark.parametrize("process", STEPS, ids=["dedicated", "pooled"])
async def test_daemons_killed_at_steps_of_a_group_lose_nothing(make_daemon, pool_id, process):
    """Each step in a pool of its own, side by side."""
    ending = {"lifecycle": {"unbind_delay": "1s", "extra_lifetime": "100ms"}}
    settings = merged(POOLED if process == PROCESS_KEY else {}, ending)
    async with asyncio.TaskGroup() as group:
        for number, (event, fields) in enumerate(STEPS[process].items()):
            daemon = make_daemon(pool=f"{pool_id}_{number}", **settings)
            group.create_task(kill_at(daemon, event, fields, process))

"""kill -9 of the daemon at any time: no confirmed request is lost, workers go on, no key gets a second one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from daemon_process import DaemonProcess, MakeDaemon
from durable_caller import DurableCaller

KEYS = ("infra=42,timetable=24", "a", "b")
Moment = Callable[[DaemonProcess, DurableCaller], Awaitable[object]]


async def burst(caller: DurableCaller, path: str = "/info", body: object = None) -> None:
    """Confirmed requests for every key."""
    await asyncio.gather(*(caller.send(key, path, body) for key in KEYS for _ in range(4)))


async def while_orphans_are_queued(daemon: DaemonProcess, caller: DurableCaller) -> None:
    daemon.kill()
    await burst(caller)
    daemon.launch()
    await daemon.until_event("leading")


async def right_after_a_burst(daemon: DaemonProcess, caller: DurableCaller) -> None:
    await burst(caller)


async def when_the_first_queue_is_bound(daemon: DaemonProcess, caller: DurableCaller) -> None:
    await burst(caller)
    await daemon.until_event("request queue changed", step="bind")


async def while_workers_load(daemon: DaemonProcess, caller: DurableCaller) -> None:
    await burst(caller)
    await daemon.until_group(KEYS[0], lambda group: group["workers"], "its worker was started")


async def while_requests_run(daemon: DaemonProcess, caller: DurableCaller) -> None:
    await asyncio.gather(*map(caller.info, KEYS))
    await burst(caller, "/sleep", {"seconds": 0.7})


@pytest.mark.parametrize(
    "moment",
    [
        while_orphans_are_queued,
        right_after_a_burst,
        when_the_first_queue_is_bound,
        while_workers_load,
        while_requests_run,
    ],
    ids=lambda moment: moment.__name__,
)
async def test_daemon_killed_under_load_loses_nothing(
    make_daemon: MakeDaemon, caller: DurableCaller, moment: Moment
) -> None:
    daemon = make_daemon()
    daemon.set_faults({KEYS[0]: {"config": {"load_seconds": 1}}})
    await daemon.start()
    async with daemon.watching_for_twins():
        await moment(daemon, caller)
        daemon.kill()
        running = {worker.key: worker.pid for worker in daemon.workers()}
        await burst(caller)
        await caller.send("new")
        await daemon.start()
        await caller.until_all_answered()
        told = {key: await caller.info(key) for key in KEYS}
    assert caller.statuses() == {"ok"}
    assert {key: told[key]["pid"] for key in running} == running


async def test_workers_answer_while_no_daemon_runs(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon()
    await daemon.start()
    pid = (await caller.info("k"))["pid"]
    daemon.kill()
    assert (await caller.info("k"))["pid"] == pid


ENDING = {"lifecycle": {"unbind_delay": "1s", "extra_lifetime": "100ms"}}


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("request queue changed", {"step": "unbind"}),
        ("group ends", {}),
        ("worker stopping", {}),
        ("worker ended", {}),
        ("request queue deleted", {}),
    ],
    ids=["unbound", "ends", "stopping", "stopped", "deleted"],
)
async def test_daemon_killed_while_a_group_ends_loses_nothing(
    make_daemon: MakeDaemon, caller: DurableCaller, event: str, fields: dict[str, object]
) -> None:
    daemon = make_daemon(**ENDING)
    await daemon.start()
    await caller.info("k")
    async with daemon.watching_for_twins():
        await daemon.until_event(event, **fields)
        daemon.kill()
        for _ in range(3):
            await caller.send("k")
        await daemon.start()
        await caller.until_all_answered()
    assert caller.statuses() == {"ok"}
    assert len(daemon.pids("k")) == 1

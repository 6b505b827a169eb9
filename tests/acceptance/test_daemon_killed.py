"""kill -9 of the daemon at any time: no confirmed request is lost, workers go on, no key gets a second one."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from daemon_process import DaemonProcess
from durable_caller import DurableCaller, durable_caller

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


ENDING = {"lifecycle": {"unbind_delay": "1s", "extra_lifetime": "100ms"}}
STEPS: dict[str, dict[str, object]] = {
    "request queue changed": {"step": "unbind"},
    "worker stopping": {},
    "worker ended": {},
}
"""What a daemon logs while a group ends, in this order; the steps between them are those of the component tests."""


async def kill_at(daemon: DaemonProcess, event: str, fields: dict[str, object]) -> None:
    """Kill the daemon at this step of the end of a group, with requests coming in, and start it again."""
    async with durable_caller(daemon.amqp_uri, daemon.pool) as caller:
        await daemon.start()
        await caller.info("k")
        async with daemon.watching_for_twins():
            await daemon.until_event(event, **fields)
            daemon.kill()
            for _ in range(3):
                await caller.send("k")
            await daemon.start()
            await caller.until_all_answered()
        assert caller.statuses() == {"ok"}, event
        assert len(daemon.pids("k")) <= 1, event  # the group may have ended again


async def test_daemons_killed_while_a_group_ends_lose_nothing(make_daemon, pool_id):
    """Each step in a pool of its own, side by side."""
    async with asyncio.TaskGroup() as group:
        for number, (event, fields) in enumerate(STEPS.items()):
            daemon = make_daemon(pool=f"{pool_id}_{number}", **ENDING)
            group.create_task(kill_at(daemon, event, fields))

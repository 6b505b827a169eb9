"""SIGTERM and SIGINT: consumers first, workers go on and are adopted by the next daemon, unless asked otherwise."""

import asyncio
import signal

import pytest
from daemon_process import until


async def test_daemon_that_stops_its_workers_leaves_none(make_daemon, caller, tmp_path):
    daemon, gate = make_daemon(), tmp_path / "gate"
    await daemon.start("--stop-workers")
    await asyncio.gather(caller.info("a"), caller.info("b"))
    long = await caller.send("a", "/wait", {"file": str(gate)})
    await daemon.until_group("a", lambda group: group["workers"][0]["state"] == "busy", "it is busy")
    daemon.send_signal(signal.SIGTERM)
    gate.touch()
    assert await daemon.wait() == 0
    assert daemon.workers() == []
    await daemon.start()
    assert (await caller.answer(long)).status == "ok"


@pytest.mark.proves("controller/several-daemons-run-one")
async def test_second_daemon_of_a_pool_stands_by_and_takes_over(make_daemon, caller):
    leader, standby = make_daemon(), make_daemon()
    standby.write_settings(driver=leader.settings["driver"])
    standby.state = leader.state
    await leader.start()
    standby.launch()
    pid = (await caller.info("k"))["pid"]

    async def stands_by():
        ready = await standby.get("/ready")
        return (ready.get("ready"), ready.get("role"), ready.get("leader")) == (True, "standby", leader.api)

    await until(stands_by, "the standby is up and knows the leader")
    assert f"leader: {leader.api}" in standby.osrdyne("status").stdout
    leader.kill()
    await standby.until_leading()
    assert (await standby.get("/ready"))["leader"] == standby.api
    assert (await caller.info("k"))["pid"] == pid
    assert (await caller.call("new")).status == "ok"

"""Groups of several workers, and workers that are replaced: real processes, and no request lost or answered twice."""

import asyncio

import pytest
from daemon_process import until


@pytest.mark.nightly
async def test_group_grows_with_what_waits_and_shrinks_again(make_daemon, caller):
    daemon = make_daemon(worker={"scaling": {"max": 3, "target_lag": "1s", "cooldown": "1s"}})
    await daemon.start()
    requests = [await caller.send("k", "/sleep", {"seconds": 2}) for _ in range(24)]
    await until(lambda: len(daemon.pids("k")) == 3, "three workers share the requests")
    await asyncio.gather(*map(caller.answer, requests))
    await until(lambda: len(daemon.pids("k")) == 1, "one worker is enough again")
    assert caller.statuses() == {"ok"}
    assert [len(caller.answers[request]) for request in requests] == [1] * 24
    assert daemon.events("worker ended", component="worker_actions") == []


@pytest.mark.proves("workers/settings-change-workers-run")
async def test_changed_settings_replace_a_busy_worker_when_it_has_finished(make_daemon, caller, tmp_path):
    daemon, gate = make_daemon(), tmp_path / "gate"
    await daemon.start()
    before = await caller.info("k")
    long = await caller.send("k", "/wait", {"file": str(gate)})
    await daemon.until_group("k", lambda group: group["workers"][0]["state"] == "busy", "it is busy")
    await daemon.stop()
    daemon.write_settings(worker={"config": {"greeting": "changed"}})
    await daemon.start()
    await until(lambda: len(daemon.pids("k")) == 2, "the successor is there")
    gate.touch()
    await caller.answer(long)
    await until(lambda: before["pid"] not in daemon.pids("k"), "the old worker has ended")
    assert (await caller.info("k"))["greeting"] == "changed"
    assert (caller.statuses(), len(caller.answers[long])) == ({"ok"}, 1)
    assert daemon.events("worker stopping") == []

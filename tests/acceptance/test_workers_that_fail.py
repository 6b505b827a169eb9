"""Workers that are killed, crash or cannot start: their callers get an answer, and other groups are not affected."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from daemon_process import PATIENCE, DaemonProcess, MakeDaemon, until
from durable_caller import DurableCaller

from osrdyne.client import StartFailedError


@pytest.mark.proves("workers/worker-dies-during-request")
async def test_worker_killed_in_a_request_is_replaced_and_the_request_answered(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Path
) -> None:
    daemon, gate = make_daemon(), tmp_path / "gate"
    await daemon.start()
    before = await caller.info("k")
    request = await caller.send("k", "/wait", {"file": str(gate)})
    await daemon.until_group("k", lambda group: group["workers"][0]["state"] == "busy", "it is busy")
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    gate.touch()
    assert (await caller.answer(request)).status == "ok"
    after = await caller.info("k")
    assert after["pid"] != before["pid"]
    assert len(daemon.workers()) == 1


@pytest.mark.proves("workers/worker-hangs-disconnected")
async def test_hanging_worker_is_replaced_and_its_request_answered(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Path
) -> None:
    daemon, gate = make_daemon(worker={"silence_timeout": "6s", "stop_grace": "1s"}), tmp_path / "gate"
    await daemon.start()
    before = await caller.info("k")
    request = await caller.send("k", "/wait", {"file": str(gate)})
    await daemon.until_group("k", lambda group: group["workers"][0]["state"] == "busy", "it is busy")
    os.kill(int(str(before["pid"])), signal.SIGSTOP)
    gate.touch()
    assert (await caller.answer(request)).status == "ok"
    assert (await caller.info("k"))["pid"] != before["pid"]
    assert daemon.events("worker hangs", key="k", why="it did not answer")


BROKEN = {"exit": 3, "says": "cannot open the data of this key"}


@pytest.mark.proves("workers/worker-start")
async def test_group_that_cannot_start_answers_and_recovers(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon()
    daemon.set_faults({"broken": BROKEN})
    await daemon.start()
    pid = (await caller.info("other"))["pid"]
    async with daemon.client() as client:
        with pytest.raises(StartFailedError) as caught:
            await client.call("broken", "/info", timeout=PATIENCE)
        assert BROKEN["says"] in caught.value.log_lines
        assert "exit code 3" in str(caught.value)
        assert caught.value.retry_after is not None
        with pytest.raises(StartFailedError):  # at once, without another attempt
            await client.call("broken", "/info", timeout=PATIENCE)
        assert len(daemon.events("worker started", key="broken")) == 1
        assert (await client.call("other", "/info", timeout=PATIENCE)).json()["pid"] == pid
        daemon.set_faults({})

        async def recovered() -> bool:
            reply = await client.call("broken", "/info", timeout=PATIENCE, raise_on_error=False)
            return reply.ok

        await until(recovered, "a request after the back-off starts it", interval=1.0)
    assert len(daemon.events("worker started", key="broken")) == 2


@pytest.mark.nightly
@pytest.mark.proves("workers/worker-start")
async def test_error_of_the_application_at_start_reaches_the_caller(
    make_daemon: MakeDaemon, caller: DurableCaller
) -> None:
    daemon = make_daemon()
    daemon.set_faults({"k": {"config": {"load_error": "the table lineitem is missing"}}})
    await daemon.start()
    answer = await caller.call("k")
    assert answer.status == "start-failed"
    assert "the table lineitem is missing" in str(answer.detail)


@pytest.mark.nightly
async def test_command_that_does_not_exist_is_named(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon(driver={"options": {"command": ["/nowhere/worker"]}})
    await daemon.start()
    for answer in [await caller.call("k"), await caller.call("k")]:
        assert answer.status == "start-failed"
        assert "/nowhere/worker: No such file or directory" in str(answer.detail)
        assert "driver.options.command" in str(answer.detail)


async def poison(daemon: DaemonProcess) -> list[dict[str, object]]:
    listed = daemon.osrdyne("poison", "list", "-o", "json")
    assert listed.returncode == 0, listed.stderr
    messages: list[dict[str, object]] = json.loads(listed.stdout)
    return messages


@pytest.mark.nightly
@pytest.mark.proves("workers/one-request-kills-every")
async def test_request_that_crashes_every_worker_becomes_poison(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon(requests={"delivery_limit": 3, "poison_time": 0})  # 0: its text is not refused before
    await daemon.start()
    answer = await caller.call("k", "/crash", {"why": "test"})
    assert answer.status == "delivery_limit"
    # A limit of 3 is reached by the fourth delivery; the daemon may hear of the last death after the dead letter.
    await until(lambda: len(daemon.events("worker ended", key="k")) >= 4, "four workers have died")
    assert "4 times" in str(answer.detail)
    [message] = await poison(daemon)
    assert (message["key"], message["path"], message["reason"]) == ("k", "/crash", "delivery_limit")
    shown = daemon.osrdyne("poison", "show", str(message["id"]))
    assert '{"why": "test"}' in shown.stdout
    assert (await caller.info("k"))["redelivered"] is False

"""`osrdyne groups …` from another process, against a running daemon."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, MakeDaemon
from durable_caller import DurableCaller

pytestmark = pytest.mark.one_rabbitmq

KEY = "infra=42,timetable=24"


def run(daemon: DaemonProcess, *arguments: str) -> str:
    done = daemon.osrdyne(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.nightly
async def test_group_is_started_shown_and_stopped_by_command(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon()
    await daemon.start()
    run(daemon, "groups", "start", KEY)
    group = await daemon.until_group(KEY, lambda group: group["workers"], "it has a worker")
    await daemon.until_group(KEY, lambda group: group["workers"][0]["state"] in {"ready", "idle"}, "it is ready")
    assert KEY in run(daemon, "groups", "list")
    shown = run(daemon, "groups", "show", KEY)
    assert group["workers"][0]["worker_id"] in shown
    assert group["queue"]["name"] in shown
    assert re.search(r"cold start of .*: process [0-9.]+ s · python [0-9.]+ s · load [0-9.]+ s", shown)
    assert "ready" in run(daemon, "groups", "logs", KEY)
    run(daemon, "groups", "stop", KEY)
    await daemon.until_gone(KEY)
    assert daemon.workers() == []
    assert json.loads(run(daemon, "groups", "list", "-o", "json")) == []


@pytest.mark.proves("workers/worker-report-outcome-reload")
async def test_reload_by_hand_is_answered_with_the_outcome(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("0", encoding="utf-8")
    worker = [str(Path(sys.executable).with_name("osrdyne-worker")), "tests.integration.changing_app:app"]
    daemon = make_daemon(
        driver={"options": {"command": worker}},
        worker={"app": "tests.integration.changing_app:app", "config": {"directory": str(tmp_path)}},
    )
    await daemon.start()
    missing = daemon.osrdyne("groups", "reload", KEY)
    assert (missing.returncode, "no group" in missing.stderr) == (1, True)
    async with daemon.client() as client:
        assert (await client.call(KEY, "/data")).body == b"0"
        (tmp_path / "data").write_text("1", encoding="utf-8")
        assert "reloaded" in await asyncio.to_thread(run, daemon, "groups", "reload", KEY)
        assert (await client.call(KEY, "/data")).body == b"1"
        (tmp_path / "fail").touch()
        failed = await asyncio.to_thread(daemon.osrdyne, "groups", "reload", KEY)
        assert (failed.returncode, "the data is broken" in failed.stdout) == (1, True)
        (tmp_path / "fail").unlink()
        # A worker that dies meanwhile.
        for name in ("hold", "die"):
            (tmp_path / name).touch()
        before = (tmp_path / "reloads").read_text(encoding="utf-8")
        dying = asyncio.create_task(asyncio.to_thread(daemon.osrdyne, "groups", "reload", KEY))
        async with asyncio.timeout(120):
            while (tmp_path / "reloads").read_text(encoding="utf-8") == before:
                await asyncio.sleep(0.05)
        (tmp_path / "hold").unlink()
        ended = await dying
        assert (ended.returncode, "ended" in ended.stdout) == (0, True), ended.stdout
        (tmp_path / "die").unlink()
        assert (await client.call(KEY, "/data", timeout=120)).body == b"1"


@pytest.mark.nightly
async def test_pinned_group_outlives_idleness_and_the_daemon(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon(lifecycle={"unbind_delay": "1s", "extra_lifetime": "100ms", "stop_delay": "60s"})
    await daemon.start()
    run(daemon, "groups", "pin", KEY)
    pid = (await caller.info(KEY))["pid"]
    await caller.info("not pinned")
    await daemon.until_group("not pinned", lambda group: group["state"] == "unbound", "unbound")
    await daemon.restart()
    group = (await daemon.groups())[KEY]
    assert (group["pinned"], group["state"]) == (True, "active")
    assert daemon.pids(KEY) == [pid]
    run(daemon, "groups", "unpin", KEY)
    await daemon.until_group(KEY, lambda group: group["state"] == "unbound", "unbound")

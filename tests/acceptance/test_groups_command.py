"""`osrdyne groups …` from another process, against a running daemon."""

from __future__ import annotations

import json
import re

from daemon_process import DaemonProcess, MakeDaemon
from durable_caller import DurableCaller

KEY = "infra=42,timetable=24"


def run(daemon: DaemonProcess, *arguments: str) -> str:
    done = daemon.osrdyne(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


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

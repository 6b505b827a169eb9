"""A request that kills every worker, from its first death to its late answer. One daemon for all tests but one."""

import json
from typing import Any

import pytest
from daemon_process import DaemonProcess, until

pytestmark = pytest.mark.rabbitmq4

SETTINGS = {"requests": {"delivery_limit": 3}}


def poison(daemon: DaemonProcess, key: str) -> list[dict[str, Any]]:
    listed = daemon.osrdyne("poison", "list", "--key", key, "-o", "json")
    assert listed.returncode == 0, listed.stderr
    entries: list[dict[str, Any]] = json.loads(listed.stdout)
    return entries


@pytest.mark.proves("workers/one-request-kills-every", "workers/request-kills-worker")
async def test_request_that_kills_workers_is_kept_explained_and_answered_in_the_end(
    shared_daemon, shared_caller, tmp_path
):
    await shared_caller.info("k")
    repaired = tmp_path / "repaired"
    deadly = await shared_caller.send("k", "/crash", {"unless": str(repaired)})
    innocent = await shared_caller.send("k", "/info", {})
    assert (await shared_caller.answer(innocent)).status == "ok"
    assert (await shared_caller.answer(deadly)).status == "poison"
    again = await shared_caller.call("k", "/crash", {"unless": str(repaired)})
    assert (again.status, again.code) == ("poison", 422)

    [entry] = poison(shared_daemon, "k")
    assert (entry["key"], entry["path"], entry["correlation_id"], entry["deliveries"]) == ("k", "/crash", deadly, 2)
    assert entry["unexplained"] <= 1  # of its first delivery there need be no report
    assert {(death["ended_with"], death["others"]) for death in entry["deaths"]} == {("exit code 9", 0)}
    shown = shared_daemon.osrdyne("poison", "show", entry["id"][:8]).stdout
    assert entry["deaths"][-1]["worker_id"] in shown
    assert "the worker dies now" in shown

    repaired.touch()
    assert shared_daemon.osrdyne("poison", "replay", entry["id"]).returncode == 0
    await until(lambda: len(shared_caller.answers[deadly]) == 2, "the request is answered again")
    assert shared_caller.answers[deadly][1].status == "ok"
    assert poison(shared_daemon, "k") == []


@pytest.mark.proves("workers/leader-dies-request-killed")
async def test_suspect_is_answered_although_the_leader_dies_with_the_worker(shared_daemon, shared_caller):
    deadly = await shared_caller.send("suspect", "/crash", {})
    await until(lambda: len(shared_daemon.events("worker started", key="suspect")) == 2, "its second worker is started")
    await shared_daemon.restart()
    assert (await shared_caller.answer(deadly)).status in {"poison", "delivery_limit"}
    assert [entry["correlation_id"] for entry in poison(shared_daemon, "suspect")] == [deadly]
    assert (await shared_caller.call("suspect", "/info", {})).status == "ok"

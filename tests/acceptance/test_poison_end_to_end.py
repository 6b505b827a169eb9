"""A request that kills every worker, from its first death to its late answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, MakeDaemon, until
from durable_caller import DurableCaller

pytestmark = pytest.mark.rabbitmq4


def poison(daemon: DaemonProcess, *arguments: str) -> list[dict[str, Any]]:
    listed = daemon.osrdyne("poison", "list", "-o", "json", *arguments)
    assert listed.returncode == 0, listed.stderr
    entries: list[dict[str, Any]] = json.loads(listed.stdout)
    return entries


@pytest.mark.proves("workers/one-request-kills-every", "workers/request-kills-worker")
async def test_request_that_kills_workers_is_kept_explained_and_answered_in_the_end(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Path
) -> None:
    daemon = make_daemon(requests={"delivery_limit": 3})
    await daemon.start()
    await caller.info("k")
    repaired = tmp_path / "repaired"
    deadly = await caller.send("k", "/crash", {"unless": str(repaired)})
    innocent = await caller.send("k", "/info", {})
    assert (await caller.answer(innocent)).status == "ok"
    answer = await caller.answer(deadly)
    assert answer.status == "poison"
    assert "deliveries ended with the death of the worker that ran it" in str(answer.detail)
    again = await caller.call("k", "/crash", {"unless": str(repaired)})
    assert (again.status, again.code) == ("poison", 422)

    [entry] = poison(daemon)
    assert (entry["key"], entry["path"], entry["correlation_id"], entry["deliveries"]) == ("k", "/crash", deadly, 2)
    assert entry["unexplained"] <= 1  # of its first delivery there need be no report
    assert {(death["ended_with"], death["others"]) for death in entry["deaths"]} == {("exit code 9", 0)}
    shown = daemon.osrdyne("poison", "show", entry["id"][:8]).stdout
    assert f"worker {entry['deaths'][-1]['worker_id']} ended with exit code 9\n" in shown
    assert "    the worker dies now\n" in shown

    repaired.touch()
    replayed = daemon.osrdyne("poison", "replay", entry["id"])
    assert (replayed.returncode, replayed.stdout) == (0, "1 entry replayed.\n")
    await until(lambda: len(caller.answers[deadly]) == 2, "the request is answered again")
    assert caller.answers[deadly][1].status == "ok"
    assert poison(daemon) == []


@pytest.mark.nightly
async def test_poison_outlives_the_daemon(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon(requests={"delivery_limit": 3})
    await daemon.start()
    deadly = await caller.send("k", "/crash", {})
    assert (await caller.answer(deadly)).status == "poison"
    before = poison(daemon)
    await daemon.restart()
    assert poison(daemon) == before
    assert daemon.osrdyne("poison", "drop", "--key", "k", "--yes").stdout == "1 entry dropped.\n"
    assert poison(daemon) == []


@pytest.mark.nightly
async def test_standby_answers_from_the_leader(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    leader = make_daemon(requests={"delivery_limit": 3})
    await leader.start()
    assert (await caller.call("k", "/crash", {})).status == "poison"
    standby = make_daemon(
        requests={"delivery_limit": 3}, driver={"options": {"state_directory": str(leader.state.parent)}}
    )
    standby.launch()

    async def stands_by() -> bool:
        return "standby" in str((await standby.get("/ready")).get("role"))

    await until(stands_by, "the second daemon stands by")
    answer = await standby.get("/v1/poison")
    assert (answer["status"], answer["code"], answer["leader"]) == (421, "not-leading", leader.api)
    assert poison(standby) == poison(leader)


@pytest.mark.nightly
@pytest.mark.proves("workers/request-kills-worker")
async def test_requests_that_kill_workers_delay_others_by_a_restart_each(
    make_daemon: MakeDaemon, caller: DurableCaller, tmp_path: Path
) -> None:
    """Each kills two workers: the second one with nothing else in it. No back-off comes in between."""
    daemon = make_daemon()
    await daemon.start()
    await caller.info("k")
    # All others arrive while it runs: a request that arrives after a death is no suspect, and would run before them.
    await caller.send("k", "/sleep", {"seconds": 5})
    deadly = [await caller.send("k", "/crash", {"unless": str(tmp_path / f"never {number}")}) for number in range(3)]
    innocent = [await caller.send("k", "/info", {"number": number}) for number in range(3)]
    assert [(await caller.answer(one)).status for one in innocent] == ["ok"] * 3
    assert [(await caller.answer(one)).status for one in deadly] == ["poison"] * 3
    assert (await caller.call("k", "/info", {})).status == "ok"
    assert len(daemon.events("worker started", key="k")) == 1 + 2 * len(deadly)
    assert len(poison(daemon)) == len(deadly)


@pytest.mark.nightly
async def test_without_poison_time_the_delivery_limit_decides(make_daemon: MakeDaemon, caller: DurableCaller) -> None:
    daemon = make_daemon(requests={"delivery_limit": 3, "poison_time": 0})
    await daemon.start()
    assert (await caller.call("k", "/crash", {})).status == "delivery_limit"
    assert [entry["reason"] for entry in poison(daemon)] == ["delivery_limit"]


@pytest.mark.proves("workers/leader-dies-request-killed")
async def test_suspect_is_answered_although_the_leader_dies_with_the_worker(
    make_daemon: MakeDaemon, caller: DurableCaller
) -> None:
    daemon = make_daemon(requests={"delivery_limit": 3})
    await daemon.start()
    deadly = await caller.send("k", "/crash", {})
    await until(lambda: len(daemon.events("worker started", key="k")) == 2, "its second worker is started")
    daemon.kill()
    await daemon.start()
    assert (await caller.answer(deadly)).status in {"poison", "delivery_limit"}
    assert [entry["correlation_id"] for entry in poison(daemon)] == [deadly]
    assert (await caller.call("k", "/info", {})).status == "ok"

"""The commands of quotas, rates, lag, capacity and queues with one daemon and RabbitMQ."""

import asyncio
import json
import subprocess
from typing import Any

import pytest
from daemon_process import DaemonProcess, until
from managed_callers import managed, numbered, without_workers

pytestmark = pytest.mark.one_rabbitmq

SENT, EVENTS = 20, 4
"""Requests, and events a minute."""


def run(daemon: DaemonProcess, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = daemon.osrdyne(*arguments)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def shown(daemon: DaemonProcess, *arguments: str) -> Any:
    return json.loads(run(daemon, *arguments, "--output", "json").stdout)


@pytest.mark.nightly
async def test_commands_set_and_show_what_acts_on_requests(make_daemon, answers):
    daemon = managed(make_daemon, lifecycle={"resync_interval": "2s"})
    await without_workers(daemon)
    await asyncio.to_thread(set_quotas, daemon)  # the connection of the caller needs its heartbeats meanwhile
    await answers.send("any", numbered("waits", SENT))
    await lag_and_load_are_those_of_the_requests(daemon)
    await queues_are_created_renewed_and_removed(daemon)


def set_quotas(daemon: DaemonProcess) -> None:
    assert "There are no quotas" in run(daemon, "quota", "show").stdout
    run(daemon, "capacity", "--from-history", code=2)
    run(daemon, "quota", "set", "--messages-per-day", "400000", "--units", "2", "--share", "principal", "--author", "a")
    run(daemon, "quota", "set", "--rule", "sensors", "--keys", "s-.*", "--per", "key", "--send-rate", "5")
    run(daemon, "quota", "rate", "store", "--events-per-minute", str(EVENTS), "--max-units", "1")
    text = run(daemon, "quota", "show").stdout
    assert "800,000 a day, in blocks of 4096 bytes" in text
    assert "keys s-.*, each key" in text
    assert f"{EVENTS} events a minute" in text
    current = shown(daemon, "quota", "show")["current"]
    assert (current["version"], set(current["manifest"])) == (3, {"pool", "rules", "rates"})
    wrong = run(daemon, "quota", "rate", "store", "--preset", "store-s1", "--units", "11", code=2)
    assert "rates.0.units" in wrong.stderr


async def lag_and_load_are_those_of_the_requests(daemon: DaemonProcess) -> None:
    async def all_wait() -> bool:
        return bool((await daemon.get("/v1/lag"))["total"]["messages"] == SENT)

    await until(all_wait, "all requests wait")
    [group] = shown(daemon, "lag")["groups"]
    assert (group["key"], group["drained_in"]) == ("cam", None)
    assert "all groups" in run(daemon, "lag").stdout
    plan = shown(daemon, "capacity", "--from-history", "--events", str(EVENTS), "--store", "store-s1")
    assert (plan["fits"], plan["accepted"], plan["repeats"]) == (True, SENT, True)
    assert [meter["demand"] for meter in plan["meters"] if meter["meter"] == "blocks a day"] == [SENT]


async def queues_are_created_renewed_and_removed(daemon: DaemonProcess) -> None:
    assert "not created" in run(daemon, "queues", "list").stdout  # it came with a request
    created = shown(daemon, "queues", "create", "made", "--for", "2h", "--author", "a")
    assert (created["key"], created["created"], created["author"]) == ("made", True, "a")
    assert {one["key"] for one in shown(daemon, "queues", "list")} == {"cam", "made"}
    renewed = shown(daemon, "queues", "renew", "made", "--for", "36h")
    assert renewed["expires_at"] > created["expires_at"]
    assert "ExpirationInstant" in run(daemon, "queues", "show", "made").stdout
    run(daemon, "queues", "create", "other", "--for", "soon", code=2)
    run(daemon, "queues", "delete", "made")

    async def is_gone() -> bool:
        return [one["key"] for one in (await daemon.get("/v1/queues"))["queues"]] == ["cam"]

    await until(is_gone, "the queue is removed")
    assert "has no queue" in run(daemon, "queues", "show", "made", code=1).stderr

"""The commands of quotas, rates, lag, capacity and queues with one daemon, one worker and RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from daemon_process import DaemonProcess, MakeDaemon, until
from managed_callers import Answers, answers_of, managed, numbered

from osrdyne.config.models import BrokerSettings

pytestmark = pytest.mark.one_rabbitmq

SENT, EVENTS, FAST = 400, 4, 24_000
"""Requests, events in each, and events a minute of the fast rate."""
BODY = json.dumps({"events": [{"temperature": 20}] * EVENTS}).encode()


@pytest.fixture
async def answers(broker_settings: BrokerSettings, pool_id: str) -> AsyncIterator[Answers]:
    async with answers_of(broker_settings.uri.get_secret_value(), pool_id) as collected:
        yield collected


def run(daemon: DaemonProcess, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = daemon.osrdyne(*arguments)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def shown(daemon: DaemonProcess, *arguments: str) -> Any:
    return json.loads(run(daemon, *arguments, "--output", "json").stdout)


@pytest.mark.nightly
@pytest.mark.proves("quotas/clients-send-more-events")
async def test_commands_set_and_show_what_acts_on_requests(make_daemon: MakeDaemon, answers: Answers) -> None:
    daemon = managed(make_daemon, lifecycle={"resync_interval": "2s"})
    await daemon.start()
    set_quotas(daemon)
    await rate_holds_requests_back_and_a_change_lets_them_go(daemon, answers)
    await load_of_the_record_is_planned(daemon)
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


async def rate_holds_requests_back_and_a_change_lets_them_go(daemon: DaemonProcess, answers: Answers) -> None:
    names = numbered("measured", SENT)
    for name in names:  # one after the other: the order of service is that of sending
        await answers.send("any", [name], body=BODY)
    # The events of the first request last for a minute; the worker holds the second, and the others wait in the queue.
    await answers.until_served(names[:1])

    async def all_wait() -> bool:
        found = await daemon.get("/v1/lag")
        served = len(answers.order(names))
        return bool(found["total"]["messages"] == SENT - served - 1)

    await until(all_wait, "the lag is the number of requests that are not served, without the one in the worker")
    [group] = shown(daemon, "lag")["groups"]
    assert (group["key"], group["drained_in"]) == ("cam", None)
    assert group["seconds"] > 0
    assert len(answers.order(names)) < SENT // 2
    assert "all groups" in run(daemon, "lag").stdout

    # Before the command, and not after it: the worker may serve many requests until the process has ended.
    begun, before = asyncio.get_running_loop().time(), len(answers.order(names))
    run(daemon, "quota", "rate", "store", "--events-per-minute", str(FAST), "--max-units", "1")
    await answers.until_served(names)
    elapsed = asyncio.get_running_loop().time() - begun
    # However slow the machine is, it never serves more than the rate, a second's burst and one request.
    assert (SENT - before) * EVENTS <= elapsed * FAST / 60 + FAST / 60 + 2 * EVENTS
    assert answers.order(names) == names
    assert (len(answers.served), Counter(status for _, status in answers.served)) == (SENT, {"ok": SENT})

    async def shows_the_rate() -> bool:
        text = run(daemon, "groups", "show", "cam").stdout
        return f": {FAST} events a minute" in text

    await until(shows_the_rate, "the worker reports its new rate")

    async def is_empty() -> bool:
        return bool((await daemon.get("/v1/lag"))["total"]["messages"] == 0)

    await until(is_empty, "nothing lags")


async def load_of_the_record_is_planned(daemon: DaemonProcess) -> None:
    plan = shown(daemon, "capacity", "--from-history", "--events", str(EVENTS), "--store", "store-s1")
    assert (plan["fits"], plan["accepted"], plan["repeats"]) == (True, SENT, True)
    assert [meter["demand"] for meter in plan["meters"] if meter["meter"] == "blocks a day"] == [SENT]
    assert "The load fits." in run(daemon, "capacity", "--from-history").stdout


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

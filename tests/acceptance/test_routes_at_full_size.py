"""Managed pools at full scale, with thousands of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from daemon_process import MakeDaemon, until
from managed_callers import (
    LONG,
    SEED,
    Answers,
    answers_of,
    apply,
    managed,
    numbered,
    until_passed_on,
    with_workers,
    without_workers,
)

from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
EVERY = 10
"""Of so many requests of the middle class one expires before there is a worker."""


@pytest.fixture
async def answers(broker_settings: BrokerSettings, pool_id: str) -> AsyncIterator[Answers]:
    async with answers_of(broker_settings.uri.get_secret_value(), pool_id) as collected:
        yield collected


async def test_ten_thousand_requests_are_served_by_priority_then_by_arrival_and_what_expired_is_answered(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path
) -> None:
    daemon = managed(make_daemon)
    await without_workers(daemon)
    apply(daemon, tmp_path, SEED)
    alerts, data, other = numbered("alert", 3000), numbered("data", 4000), numbered("other", 3000)
    late = data[::EVERY]
    for start in range(0, 3000, 500):
        await answers.send("anything", other[start : start + 500])
    for start in range(0, 4000, 500):
        await answers.send("P1_Data", data[start : start + 500], short_lived=set(late))
    for start in range(0, 3000, 500):
        await answers.send("P0_Alerts", alerts[start : start + 500])
    await until_passed_on(daemon, 3000, route="secCamAlerts")
    await with_workers(daemon)
    expected = [*alerts, *(name for name in data if name not in set(late)), *other]
    await answers.until_served([*expected, *late], timeout=LONG)
    assert answers.order(expected) == expected
    assert (answers.statuses(late), answers.statuses(expected), answers.repeated()) == ({"expired"}, {"ok"}, 0)


async def test_thousand_pending_requests_keep_their_class_when_it_is_removed_and_its_queues_go(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path, broker_settings: BrokerSettings
) -> None:
    daemon = managed(make_daemon)
    await without_workers(daemon)
    apply(daemon, tmp_path, SEED)
    before, other, after = numbered("before", 1000), numbered("other", 100), numbered("after", 100)
    await answers.send("P0_Alerts", before)
    await answers.send("anything", other)
    await until_passed_on(daemon, 100, route="upstream")
    output = apply(daemon, tmp_path, {"data": {**SEED["secCamAlerts"], "priority": 4}, "rest": SEED["upstream"]})  # type: ignore[dict-item]
    assert "Requests that still wait with priority 0, and are served: 1000." in output
    await answers.send("P0_Alerts", after)
    await until_passed_on(daemon, 100, route="data")
    await with_workers(daemon)
    expected = [*before, *after, *other]
    await answers.until_served(expected)
    assert (answers.order(expected), answers.statuses(expected)) == (expected, {"ok"})
    await until_own_queues_are(answers, broker_settings, "", "_Pri4")


async def until_own_queues_are(answers: Answers, broker_settings: BrokerSettings, *ends: str) -> None:
    """Wait until the group has the queues whose names end like this, and no others."""
    prefix = answers.names.request_queue_prefix
    wanted = {f"{prefix}cam{end}" for end in ends}
    async with ManagementClient(broker_settings) as management:

        async def are_these() -> bool:
            return {queue.name for queue in await management.list_queues(prefix)} == wanted

        await until(are_these, f"the queues of the group are {ends}")


async def test_pool_that_becomes_direct_and_managed_again_serves_everything_that_waits(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path, broker_settings: BrokerSettings
) -> None:
    daemon = managed(make_daemon)
    await without_workers(daemon)
    apply(daemon, tmp_path, SEED)
    other, data, alerts = numbered("other", 100), numbered("data", 100), numbered("alert", 100)
    await answers.send("anything", other)
    await answers.send("P1_Data", data)
    await answers.send("P0_Alerts", alerts)
    await until_passed_on(daemon, 100, route="secCamAlerts")
    daemon.settings = {**daemon.settings, "pool": {**daemon.settings["pool"], "kind": "direct"}}
    await with_workers(daemon)
    await answers.until_served([*alerts, *data, *other])
    assert answers.order([*alerts, *data, *other]) == [*alerts, *data, *other]
    await until_own_queues_are(answers, broker_settings, "")
    await answers.send("P0_Alerts", ["direct"])
    await answers.until_served(["direct"])
    daemon.settings = {**daemon.settings, "pool": {**daemon.settings["pool"], "kind": "managed"}}
    await with_workers(daemon)
    await answers.send("P0_Alerts", ["managed"])
    await answers.until_served(["managed"])
    await until_own_queues_are(answers, broker_settings, "", "_Pri0", "_Pri1")


async def test_daemon_killed_while_five_thousand_requests_pass_loses_none_and_keeps_their_order(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path
) -> None:
    daemon = managed(make_daemon)
    await daemon.start()
    apply(daemon, tmp_path, {name: SEED[name] for name in ("secCamAlerts", "secCamData")})
    alerts, data, refused = numbered("alert", 2250), numbered("data", 2250), numbered("no-route", 500)
    sending = asyncio.gather(
        answers.send("P0_Alerts", alerts), answers.send("P1_Data", data), answers.send("elsewhere", refused)
    )
    for answered in (100, 1500, 3000):
        await until(lambda answered=answered: len(answers.served) > answered, "requests pass", timeout=LONG)  # type: ignore[misc]
        await daemon.restart()
    await sending
    await answers.until_served([*alerts, *data, *refused], timeout=LONG)
    assert (answers.order(alerts), answers.order(data)) == (alerts, data)
    assert (answers.statuses([*alerts, *data]), answers.statuses(refused)) == ({"ok"}, {"no-route"})
    assert answers.repeated() < len(answers.served) / 10

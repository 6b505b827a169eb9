"""Priorities, deadlines and changes of routes in a managed pool, with a daemon and workers of their own processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, MakeDaemon, until
from managed_callers import (
    SEED,
    Answers,
    answers_of,
    apply,
    managed,
    numbered,
    until_circuits_are_stored,
    until_counted,
    until_passed_on,
    with_workers,
    without_workers,
)

from osrdyne.config.models import BrokerSettings


@pytest.fixture
async def answers(broker_settings: BrokerSettings, pool_id: str) -> AsyncIterator[Answers]:
    async with answers_of(broker_settings.uri.get_secret_value(), pool_id) as collected:
        yield collected


async def test_backlog_is_served_by_priority_then_by_arrival_and_what_expired_is_answered(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path
) -> None:
    daemon = managed(make_daemon, requests={"max_clock_skew": 0})
    await without_workers(daemon)
    apply(daemon, tmp_path, SEED)
    (tmp_path / "circuits.yaml").write_text("statisticsUpdateEnabled: true")
    applied = daemon.osrdyne("circuits", "config", "apply", str(tmp_path / "circuits.yaml"))
    assert "Version 1 is active" in applied.stdout, applied.stderr
    data, other, late, alerts = (
        numbered("data", 100),
        numbered("other", 100),
        numbered("late", 20),
        numbered("alert", 100),
    )
    await answers.send("anything", other)
    await answers.send("P1_Data", data)
    await answers.send("P1_Data", late, short_lived=late)
    await answers.send("P0_Alerts", alerts)
    await until_passed_on(daemon, 100, route="secCamAlerts")
    await asyncio.sleep(1.0)  # the second that the late ones have
    await with_workers(daemon)
    everything = [*alerts, *data, *other]
    await answers.until_served([*everything, *late])
    assert answers.order(everything) == everything
    assert (answers.statuses(late), answers.statuses(everything)) == ({"expired"}, {"ok"})
    await until_counted(daemon, 100, "osrdyne_completed_total", 'status="ok"', 'route="secCamAlerts"', 'priority="0"')
    succeeded = ("osrdyne_circuit_samples", 'route="secCamAlerts"', 'outcome="success"')
    await until_counted(daemon, 100, *succeeded)
    await until_circuits_are_stored(daemon)
    await daemon.restart()
    await until_counted(daemon, 100, *succeeded)
    circuits = json.loads(daemon.osrdyne("circuits", "list", "--output", "json").stdout)
    assert ("secCamAlerts", 100, 0) in [(one["route"], one["successes"], one["failures"]) for one in circuits]


async def test_changed_routes_leave_pending_requests_as_they_are(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path
) -> None:
    daemon = managed(make_daemon)
    await without_workers(daemon)
    apply(daemon, tmp_path, SEED)
    before, after = numbered("before", 50), numbered("after", 50)
    await answers.send("P0_Alerts", before)
    await until_passed_on(daemon, 50, route="secCamAlerts")
    turned = {"data": {**SEED["secCamAlerts"], "priority": 4}, "rest": SEED["upstream"]}  # type: ignore[dict-item]
    assert "no route has any more: 0, 1" in apply(daemon, tmp_path, turned)
    await answers.send("anything", numbered("rest", 50))
    await answers.send("P0_Alerts", after)
    await until_passed_on(daemon, 50, route="data")
    await with_workers(daemon)
    everything = [*before, *after, *numbered("rest", 50)]
    await answers.until_served(everything)
    assert answers.order(everything) == everything


async def test_killed_daemon_loses_no_request_and_keeps_the_order_of_a_class(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path
) -> None:
    daemon = managed(make_daemon)
    await daemon.start()
    apply(daemon, tmp_path, SEED)
    alerts, data = numbered("alert", 800), numbered("data", 800)
    sending = asyncio.gather(answers.send("P0_Alerts", alerts), answers.send("P1_Data", data))
    await until(lambda: len(answers.served) > 50, "requests are served")
    await daemon.restart()
    await sending
    await answers.until_served([*alerts, *data])
    assert answers.order(alerts) == alerts
    assert answers.order(data) == data
    assert {status for _, status in answers.served} == {"ok"}


@pytest.mark.nightly
async def test_history_rollback_and_explanation_of_a_running_pool(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = managed(make_daemon)
    await daemon.start()
    apply(daemon, tmp_path, SEED)
    apply(daemon, tmp_path, {})
    assert daemon.osrdyne("explain", "cam", "/x").stdout.endswith("its caller is answered no-route.\n")
    assert "Version 3 is active in the pool " in daemon.osrdyne("routes", "rollback", "1").stdout
    await daemon.restart()
    explained = daemon.osrdyne("explain", "cam", "/x", "--app-id", "SecCamMod", "-H", "x-output=P0_Alerts")
    assert "secCamAlerts: it matches and decides." in explained.stdout
    versions = json.loads(daemon.osrdyne("routes", "history", "--output", "json").stdout)
    assert [(one["version"], one["author"]) for one in versions[1:]] == [(2, "test"), (1, "test")]
    assert "No difference." in daemon.osrdyne("routes", "diff", str(shown(daemon, tmp_path))).stdout


def shown(daemon: DaemonProcess, directory: Path) -> Path:
    file = directory / "shown.json"
    file.write_text(daemon.osrdyne("routes", "show", "--output", "json").stdout)
    return file

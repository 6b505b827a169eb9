"""Priorities, deadlines and changes of routes in a managed pool, with a daemon and workers of their own processes."""

import asyncio
import json

import pytest
from daemon_process import DaemonProcess, until
from managed_callers import (
    SEED,
    Answers,
    apply,
    managed,
    numbered,
    until_circuits_are_stored,
    until_counted,
    until_passed_on,
    with_workers,
    without_workers,
)

from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings


async def send_backlog(daemon: DaemonProcess, answers: Answers, *, short_lived: list[str]) -> list[str]:
    """Requests of three classes, the most urgent ones last; these, in the order in which they are served."""
    alerts, data, other = numbered("alert", 100), numbered("data", 100), numbered("other", 100)
    await answers.send("anything", other)
    await answers.send("P1_Data", data)
    await answers.send("P1_Data", short_lived, short_lived=short_lived)
    await answers.send("P0_Alerts", alerts)
    await until_passed_on(daemon, 100, route="secCamAlerts")
    return [*alerts, *data, *other]


async def test_backlog_is_served_by_priority_then_by_arrival_and_what_expired_is_answered(
    make_daemon, answers, tmp_path
):
    daemon = managed(make_daemon)
    await without_workers(daemon)
    apply(daemon, tmp_path, SEED)
    (tmp_path / "circuits.yaml").write_text("statisticsUpdateEnabled: true")
    applied = daemon.osrdyne("circuits", "config", "apply", str(tmp_path / "circuits.yaml"))
    assert "Version 1 is active" in applied.stdout, applied.stderr
    late = numbered("late", 20)
    everything = await send_backlog(daemon, answers, short_lived=late)
    await asyncio.sleep(1.0)  # the second that the late ones have
    await with_workers(daemon)
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


async def test_killed_daemon_loses_no_request_and_keeps_the_order_of_a_class(make_daemon, answers, tmp_path):
    daemon = managed(make_daemon)
    await daemon.start()
    apply(daemon, tmp_path, {name: SEED[name] for name in ("secCamAlerts", "secCamData")})
    alerts, data, refused = numbered("alert", 800), numbered("data", 800), numbered("no-route", 100)
    sending = asyncio.gather(
        answers.send("P0_Alerts", alerts), answers.send("P1_Data", data), answers.send("elsewhere", refused)
    )
    await until(lambda: len(answers.served) > 150, "requests are served")
    await daemon.restart()
    await sending
    await answers.until_served([*alerts, *data, *refused])
    assert answers.order(alerts) == alerts
    assert answers.order(data) == data
    assert (answers.statuses([*alerts, *data]), answers.statuses(refused)) == ({"ok"}, {"no-route"})


async def until_own_queues_are(answers: Answers, broker_settings: BrokerSettings, *ends: str) -> None:
    """Wait until the group has the queues whose names end like this, and no others."""
    prefix = answers.names.request_queue_prefix
    wanted = {f"{prefix}cam{end}" for end in ends}
    async with ManagementClient(broker_settings) as management:

        async def are_these() -> bool:
            return {queue.name for queue in await management.list_queues(prefix)} == wanted

        await until(are_these, f"the queues of the group are {ends}")


@pytest.mark.nightly
async def test_pool_that_becomes_direct_and_managed_again_serves_everything_that_waits(
    make_daemon, answers, tmp_path, broker_settings
):
    daemon = managed(make_daemon)
    await without_workers(daemon)
    apply(daemon, tmp_path, SEED)
    everything = await send_backlog(daemon, answers, short_lived=[])
    for kind, waiting, ends in (("direct", everything, [""]), ("managed", [], ["", "_Pri0", "_Pri1"])):
        daemon.write_settings(pool={"kind": kind})
        await with_workers(daemon)
        await answers.until_served(waiting)
        assert answers.order(waiting) == waiting
        await answers.send("P0_Alerts", [kind])
        await answers.until_served([kind])
        await until_own_queues_are(answers, broker_settings, *ends)

"""Priorities, deadlines and changes of routes in a managed pool, with a daemon and workers of their own processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, MakeDaemon, until

from osrdyne import amqp
from osrdyne.config.models import BrokerSettings
from osrdyne.protocol.messages import PATH_HEADER, Response
from osrdyne.protocol.names import PoolNames

LOADING = 12
"""Seconds in which a worker loads, so that everything waits when it begins to serve."""
SEED = {
    "secCamAlerts": {
        "route": "FROM /messages/modules/SecCamMod/outputs/P0_Alerts INTO $upstream",
        "priority": 0,
        "timeToLiveSecs": 86400,
    },
    "secCamData": {
        "route": "FROM /messages/modules/SecCamMod/outputs/P1_Data INTO $upstream",
        "priority": 1,
        "timeToLiveSecs": 1800,
    },
    "upstream": "FROM /messages/* INTO $upstream",
}


@dataclass
class Answers:
    """Answers in the order in which they came: that of service, where one worker runs one request at a time."""

    names: PoolNames
    channel: amqp.Channel
    replies: str
    served: list[tuple[str, str]] = field(default_factory=list)
    """(name of the request, status)."""

    async def collect(self) -> None:
        async for delivery in await self.channel.consume(self.replies, no_ack=True):
            response = Response.from_wire(
                headers=delivery.headers, body=delivery.body, content_type=delivery.properties.content_type
            )
            self.served.append((delivery.properties.correlation_id or "", str(response.status)))

    async def send(self, output: str, names: Iterable[str], *, key: str = "cam", expiration: str | None = None) -> None:
        """Publish with confirms; nothing waits for an answer."""

        async def publish(name: str) -> None:
            message = amqp.Message(
                headers={"x-output": output, PATH_HEADER: "/echo"},
                correlation_id=name,
                reply_to=self.replies,
                app_id="SecCamMod",
                expiration=expiration,
            )
            await self.channel.publish(message, exchange=self.names.requests_exchange, routing_key=key, mandatory=True)

        await asyncio.gather(*map(publish, names))

    async def until_served(self, names: Sequence[str]) -> None:
        await until(lambda: {name for name, _ in self.served} >= set(names), f"{len(names)} requests are answered")

    def order(self, names: Iterable[str]) -> list[str]:
        """The first answers to these requests, in order; a repeated answer counts once."""
        wanted = set(names)
        return list(dict.fromkeys(name for name, _ in self.served if name in wanted))


@pytest.fixture
async def answers(broker_settings: BrokerSettings, pool_id: str) -> AsyncIterator[Answers]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=broker_settings.uri.get_secret_value(), name="caller"))
    channel = await connection.channel(confirms=True)
    replies = f"{pool_id}-answers"
    await channel.declare_queue(replies, exclusive=True)
    found = Answers(PoolNames(pool_id), channel, replies)
    collecting = asyncio.create_task(found.collect())
    yield found
    collecting.cancel()
    await asyncio.wait({collecting})
    await connection.close()


def managed(make_daemon: MakeDaemon, **settings: object) -> DaemonProcess:
    daemon = make_daemon(**settings)
    daemon.write_settings(pool={"kind": "managed"})
    return daemon


def apply(daemon: DaemonProcess, directory: Path, routes: object) -> str:
    manifest = directory / "manifest.json"
    manifest.write_text(json.dumps({"routes": routes}))
    done = daemon.osrdyne("routes", "apply", str(manifest), "--author", "test")
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix} {number}" for number in range(count)]


async def test_backlog_is_served_by_priority_then_by_arrival_and_what_expired_is_answered(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path
) -> None:
    daemon = managed(make_daemon, worker={"config": {"load_seconds": LOADING}})
    await daemon.start()
    apply(daemon, tmp_path, SEED)
    data, other, late, alerts = (
        numbered("data", 100),
        numbered("other", 100),
        numbered("late", 20),
        numbered("alert", 100),
    )
    await answers.send("anything", other)
    await answers.send("P1_Data", data)
    await answers.send("P1_Data", late, expiration="1000")
    await answers.send("P0_Alerts", alerts)
    everything = [*alerts, *data, *other]
    await answers.until_served([*everything, *late])
    assert answers.order(everything) == everything
    assert {status for name, status in answers.served if name in late} == {"expired"}
    assert {status for name, status in answers.served if name in everything} == {"ok"}


async def test_changed_routes_leave_pending_requests_as_they_are(
    make_daemon: MakeDaemon, answers: Answers, tmp_path: Path
) -> None:
    daemon = managed(make_daemon, worker={"config": {"load_seconds": LOADING}})
    await daemon.start()
    apply(daemon, tmp_path, SEED)
    before, after = numbered("before", 50), numbered("after", 50)
    await answers.send("P0_Alerts", before)
    await until(lambda: daemon.events("request queue changed", step="bind"), "the group is bound")
    await asyncio.sleep(1)
    turned = {"data": {**SEED["secCamAlerts"], "priority": 4}, "rest": SEED["upstream"]}  # type: ignore[dict-item]
    assert "no longer used: 0, 1" in apply(daemon, tmp_path, turned)
    await answers.send("anything", numbered("rest", 50))
    await answers.send("P0_Alerts", after)
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


async def test_history_rollback_and_explanation_of_a_running_pool(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = managed(make_daemon)
    await daemon.start()
    apply(daemon, tmp_path, SEED)
    apply(daemon, tmp_path, {})
    assert daemon.osrdyne("explain", "cam", "/x").stdout.endswith("its caller is answered no-route.\n")
    assert "Version 3 is in force." in daemon.osrdyne("routes", "rollback", "1").stdout
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

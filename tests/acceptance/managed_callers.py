"""What callers of a managed pool do, and the answers that they get, in the order in which they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from daemon_process import PATIENCE, DaemonProcess, MakeDaemon, until

from osrdyne import amqp
from osrdyne.protocol.messages import PATH_HEADER, Response
from osrdyne.protocol.names import PoolNames

LONG = 600.0
"""Seconds in which thousands of requests must be passed on or served, also on a busy machine."""
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

    async def send(
        self,
        output: str,
        names: Iterable[str],
        *,
        key: str = "cam",
        short_lived: Collection[str] = (),
        path: str = "/echo",
        body: bytes = b"",
    ) -> None:
        """Publish with confirms; nothing waits for an answer. The `short_lived` have a second."""

        async def publish(name: str) -> None:
            message = amqp.Message(
                body=body,
                headers={"x-output": output, PATH_HEADER: path},
                correlation_id=name,
                reply_to=self.replies,
                app_id="SecCamMod",
                expiration="1000" if name in short_lived else None,
            )
            await self.channel.publish(message, exchange=self.names.requests_exchange, routing_key=key, mandatory=True)

        await asyncio.gather(*map(publish, names))

    async def until_served(self, names: Sequence[str], *, timeout: float = PATIENCE) -> None:
        wanted = set(names)

        def all_are_served() -> bool:
            return len(self.served) >= len(wanted) and {name for name, _ in self.served} >= wanted

        await until(all_are_served, f"{len(wanted)} requests are answered", timeout=timeout)

    def statuses(self, names: Iterable[str]) -> set[str]:
        wanted = set(names)
        return {status for name, status in self.served if name in wanted}

    def repeated(self) -> int:
        """Answers that came again, each with the status of the first one."""
        first: dict[str, str] = {}
        for name, status in self.served:
            assert first.setdefault(name, status) == status, name
        return len(self.served) - len(first)

    def order(self, names: Iterable[str]) -> list[str]:
        """The first answers to these requests, in order; a repeated answer counts once."""
        wanted = set(names)
        return list(dict.fromkeys(name for name, _ in self.served if name in wanted))


@asynccontextmanager
async def answers_of(amqp_uri: str, pool_id: str) -> AsyncIterator[Answers]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=amqp_uri, name="caller"))
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


async def without_workers(daemon: DaemonProcess) -> None:
    """Lead with a driver that starts no worker."""
    settings = daemon.settings
    daemon.settings = {**settings, "driver": {"name": "noop"}}
    daemon.write_settings()
    await daemon.start()
    daemon.settings = settings


async def with_workers(daemon: DaemonProcess) -> None:
    """Lead with the driver of the test from now on."""
    await daemon.stop()
    daemon.write_settings()
    await daemon.start()


async def until_passed_on(daemon: DaemonProcess, requests: int, *, route: str) -> None:
    """Wait until the ingress has passed on so many by this route; of one key, what came before them is through, too."""
    await until_counted(daemon, requests, "osrdyne_ingress_total", 'outcome="accepted"', f'route="{route}"')


async def until_counted(daemon: DaemonProcess, requests: int, metric: str, *labels: str) -> None:
    """Wait until the samples of a metric that have these labels come to so many."""

    async def are_counted() -> bool:
        return await counted(daemon, metric, *labels) >= requests

    await until(are_counted, f"{requests} are counted as {metric} {labels}", timeout=LONG, interval=0.2)


async def counted(daemon: DaemonProcess, metric: str, *labels: str) -> float:
    """What the samples of a metric that have these labels come to."""
    async with httpx.AsyncClient(base_url=daemon.api, trust_env=False, verify=False, timeout=LONG) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    samples = [line for line in lines if line.startswith(f"{metric}{{") and all(label in line for label in labels)]
    return sum(float(sample.split()[-1]) for sample in samples)


async def until_circuits_are_stored(daemon: DaemonProcess) -> None:
    """Wait until a killed leader leaves its successor all samples of circuits that are counted now."""
    samples = await counted(daemon, "osrdyne_circuit_samples")

    def are_stored() -> bool:
        return any(event["samples"] >= samples for event in daemon.events("circuits stored"))

    await until(are_stored, f"{samples:g} samples of circuits are stored")

"""What callers of a managed pool do, and the answers that they get, in the order in which they come."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon_process import PATIENCE, WORKER, DaemonProcess, MakeDaemon, until
from durable_caller import answer_in
from spark_fixtures import SMALL_SPARK

from osrdyne import amqp
from osrdyne.protocol.messages import PATH_HEADER
from osrdyne.protocol.names import PoolNames
from osrdyne_worker.pipelines.telemetry.table import Table
from tests.connections import connected

INGEST = "osrdyne_worker.pipelines.ingest:app"
LONG = 600.0
"""Seconds in which thousands of requests must be passed on or served, also on a busy machine."""
OUTPUTS = "FROM /messages/modules/SecCamMod/outputs"
SEED = {
    "secCamAlerts": {"route": f"{OUTPUTS}/P0_Alerts INTO $upstream", "priority": 0, "timeToLiveSecs": 86400},
    "secCamData": {"route": f"{OUTPUTS}/P1_Data INTO $upstream", "priority": 1, "timeToLiveSecs": 1800},
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
            name, response = answer_in(delivery)
            self.served.append((name, str(response.status)))

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
        def all_are_served() -> bool:
            return len(self.served) >= len(names) and {name for name, _ in self.served} >= set(names)

        await until(all_are_served, f"{len(names)} requests are answered", timeout=timeout)

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
    async with connected(amqp_uri) as connection:
        channel = await connection.channel(confirms=True)
        replies = f"{pool_id}-answers"
        await channel.declare_queue(replies, exclusive=True)
        found = Answers(PoolNames(pool_id), channel, replies)
        collecting = asyncio.create_task(found.collect())
        yield found
        collecting.cancel()
        await asyncio.wait({collecting})


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


def ingesting(
    make_daemon: MakeDaemon, directory: Path, log: str, *tables: Table, config: Mapping[str, object], **settings: Any
) -> DaemonProcess:
    """A daemon whose worker stores the log of the pool `log` in these tables."""
    daemon = make_daemon(driver={"options": {"command": [WORKER, INGEST]}}, **settings)
    uri = directory / "uri"
    uri.touch(mode=0o600)
    uri.write_text(daemon.amqp_uri)
    places = {table.directory.name: {"directory": str(table.directory)} for table in tables}
    spark = {"spark_master": SMALL_SPARK["master"], "spark_conf": SMALL_SPARK["conf"]}
    stored = {"pool": log, "uri_file": str(uri), "tables": places, **config}
    daemon.write_settings(worker={"app": INGEST, **spark, "config": stored})
    return daemon


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
    async with daemon.http(LONG) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    samples = [line for line in lines if line.startswith(f"{metric}{{") and all(label in line for label in labels)]
    return sum(float(sample.split()[-1]) for sample in samples)


async def until_circuits_are_stored(daemon: DaemonProcess) -> None:
    """Wait until a killed leader leaves its successor all samples of circuits that are counted now."""
    samples = await counted(daemon, "osrdyne_circuit_samples")

    def are_stored() -> bool:
        return any(event["samples"] >= samples for event in daemon.events("circuits stored"))

    await until(are_stored, f"{samples:g} samples of circuits are stored")

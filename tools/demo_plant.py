"""The plant of the demo of telemetry: a private RabbitMQ, the daemons of three pools, and tables. Used by
`demo_telemetry`.

The pool `plant` has the log and serves alarms; Spark workers of the pool `ingest` store the log in tables, and one of
the pool `queries` answers queries over them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
from demo_story import START_LIMIT, ask, check
from pydantic import SecretStr

from osrdyne.aio.clock import SystemClock
from osrdyne.client import AsyncClient, QuotaExceededError
from osrdyne.config.models import Settings
from osrdyne.dev.stack import SAMPLE_SPARK_CONF, running_daemon, running_stack
from osrdyne.telemetry.simulator import SimulatedMessage, Simulation, simulate
from osrdyne.telemetry.simulator_run import Devices, RunSummary, SimulatorRun
from osrdyne_worker.pipelines.telemetry.table import Table

SPEED = 60
"""A second of the demo stands for a minute."""
POOL, INGEST, QUERIES, LOG = "plant", "ingest", "queries", "sensors"
SITE = "telemetry/site-1"
DEVICES, SITES = 50, 2
ALARMS = {"alarms": {"route": "FROM /messages/* WHERE level = 'alarm' INTO $upstream", "priority": 0}}
ROUTES = {**ALARMS, "log": f'FROM /messages/* INTO BrokeredEndpoint("/streams/{LOG}/inputs/log")'}
HISTORY = 6 * 3600
"""Seconds before now in which the simulated time begins: no event is in the future."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state after so many simulated minutes, in events: those that the log has, and those in each table."""

    minute: float
    received: int
    stored: dict[str, int]

    def lag(self, table: str) -> int:
        return self.received - self.stored[table]


@dataclass
class Plant:
    """The running plant. `received`: events that the log has taken, invalid ones included."""

    api: httpx.AsyncClient
    client: AsyncClient
    ingests: AsyncClient
    queries: AsyncClient
    tables: dict[str, Table]
    began: float = field(default_factory=time.monotonic)
    received: int = 0
    samples: list[Sample] = field(default_factory=list)
    first_refused: SimulatedMessage | None = None
    _rows: dict[str, int] = field(default_factory=dict)

    @property
    def minute(self) -> float:
        """Simulated minutes since the beginning."""
        return (time.monotonic() - self.began) * SPEED / 60

    async def send(self, minutes: Fraction | int, messages_a_minute: int, **fields: Any) -> RunSummary:
        """Let the devices send for some simulated minutes."""
        simulation = Simulation(
            devices=DEVICES,
            sites=SITES,
            key="{site}",
            duration=Fraction(minutes) * 60,
            messages_a_minute=Fraction(messages_a_minute),
            start_ms=int(1000 * (time.time() - HISTORY + (SPEED - 1) * (time.monotonic() - self.began))),
            **fields,
        )
        self.first_refused = None
        # Few at once: on a slow machine devices send later, and alarms do not wait behind hundreds of messages.
        run = SimulatorRun(self._publish, clock=SystemClock(), speed=SPEED, in_flight=64)
        return await run.run(simulate(simulation))

    async def _publish(self, message: SimulatedMessage) -> None:
        try:
            await Devices(self.client, alarm_path="/echo", timeout=START_LIMIT).publish(message)
        except QuotaExceededError:
            if self.first_refused is None or message.at_us < self.first_refused.at_us:
                self.first_refused = message
            raise
        self.received += message.events if _is_json(message.body) else 1

    async def ingest(self, table: str) -> Any:
        """Let the worker of a table store the next range; its answer. The first request starts the worker."""
        return (await self.ingests.call(f"{table}/0", "/ingest", {}, timeout=START_LIMIT, idempotent=True)).json()

    async def query(self, query: str) -> list[Any]:
        """Rows of a query over the tables; its key is a site."""
        found: list[Any] = (await ask(self.queries, SITE, query)).json()["rows"]
        return found

    async def keep_ingesting(self, table: str) -> None:
        """Request ingests every second: pauses of the scheduler of half a minute would be half an hour here."""
        while True:
            await self.ingest(table)
            await asyncio.sleep(60 / SPEED)

    async def request(self, method: str, path: str, body: object = None, **params: str) -> Any:
        """The answer of the HTTP API as JSON."""
        answer = await self.api.request(method, path, json=body, params=params)
        check(answer.is_success, f"{method} {path} succeeds, and is not answered {answer.text}")
        return answer.json() if answer.content else None

    def counts(self, table: str) -> tuple[int, int]:
        """Rows of a table, and its invalid events."""
        return self._rows_of(table, invalid=False), self._rows_of(table, invalid=True)

    def _rows_of(self, table: str, *, invalid: bool) -> int:
        """Rows of the committed files. Each is read once."""
        paths = self.tables[table].files(invalid=invalid)
        for path in paths:
            if path not in self._rows:
                self._rows[path] = pq.read_metadata(path).num_rows
        return sum(self._rows[path] for path in paths)

    def take_sample(self) -> Sample:
        """The present state. Files are read before the count of what the log has: a lag is never negative."""
        stored = {name: sum(self.counts(name)) for name in self.tables}
        return Sample(self.minute, self.received, stored)

    async def keep_sampling(self) -> None:
        while True:
            self.samples.append(await asyncio.to_thread(self.take_sample))
            await asyncio.sleep(60 / SPEED)

    async def start_workers(self) -> None:
        """Start the workers of alarms, one for each site, and of the tables, before the log has a message."""
        await self.request("PUT", "/v1/routes", {"routes": ALARMS}, author="demo")
        alarms = (
            self.client.call(f"site-{site + 1}", "/echo", b"{}", headers={"level": "alarm"}, timeout=START_LIMIT)
            for site in range(SITES)
        )
        await asyncio.gather(*alarms, *map(self.ingest, self.tables), self.query("select 1"))
        await self.request("PUT", "/v1/routes", {"routes": ROUTES}, author="demo")
        # The first ingest with messages is slow, because Spark starts its Python processes.
        await self.client.call("site-1", "/telemetry", b'{"series": "start"}', timeout=START_LIMIT)
        self.received = 1
        await asyncio.gather(*map(self.ingest, self.tables))
        for table in self.tables.values():
            # Without these entries the bucket is new, and has not saved up anything meanwhile.
            shutil.rmtree(table.directory / "_throttle", ignore_errors=True)
        self.began = time.monotonic()

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        end = time.monotonic() + START_LIMIT
        while not await condition():
            check(time.monotonic() < end, what)
            await asyncio.sleep(0.2)

    async def until_stored(self, table: str) -> None:
        """Wait until a table has everything that the log has."""

        async def is_complete() -> bool:
            return (await asyncio.to_thread(self.take_sample)).lag(table) == 0

        await self.until(is_complete, f"the table {table} gets every event")


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


@asynccontextmanager
async def running_plant(
    directory: Path, tables: dict[str, dict[str, Any]], *, scheduled: Sequence[str]
) -> AsyncIterator[Plant]:
    """Start RabbitMQ and the daemons, and stop everything at the end. `tables`: their settings in the ingest, without
    `directory`. `scheduled`: those for which the leader requests ingests."""
    schedule = [{"name": name, "pool": INGEST, "target_lag": "2s", "interval": "2s"} for name in scheduled]
    plant = Settings.model_validate(
        {
            "pool": {"id": POOL, "kind": "managed"},
            "api": {"port": 0},
            "worker": {"app": "workers.examples.echo:app"},
            "telemetry": {"name": LOG, "partitions": 1, "tables": schedule},
        }
    )
    async with running_stack(plant) as running:
        management = running.broker.management_uri
        assert management is not None
        uri = _secret(directory / "rabbitmq-uri", running.broker.uri)
        management_uri = _secret(directory / "rabbitmq-management-uri", management)
        ingest = _spark_pool(
            running,
            INGEST,
            "osrdyne_worker.pipelines.ingest:app",
            {
                "pool": POOL,
                "uri_file": uri,
                "management_uri_file": management_uri,
                "tables": {name: {"directory": str(directory / name), **tables[name]} for name in tables},
            },
        )
        views = [{"view": name, "format": "telemetry", "path": name, "keys": "{site}"} for name in tables]
        queries = _spark_pool(
            running,
            QUERIES,
            "osrdyne_worker.pipelines.sql:app",
            {"base_directory": str(directory), "datasets": [{"key": "telemetry/{site}", "tables": views}]},
        )
        base = f"http://127.0.0.1:{running.api.port}"
        amqp = running.broker.uri.get_secret_value()
        async with (
            running_daemon(ingest),
            running_daemon(queries),
            httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as api,
            AsyncClient(amqp, POOL, name="device") as client,
            AsyncClient(amqp, INGEST, name="demo") as ingests,
            AsyncClient(amqp, QUERIES, name="demo") as asking,
        ):
            yield Plant(api, client, ingests, asking, {name: Table(directory / name) for name in tables})


def _spark_pool(running: Settings, pool: str, app: str, config: dict[str, Any]) -> Settings:
    """A pool with Spark workers on the same RabbitMQ."""
    worker = {
        "app": app,
        "spark_master": "local[2]",
        "spark_conf": {**SAMPLE_SPARK_CONF, "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"},
        "config": config,
    }
    settings = Settings.model_validate({"pool": {"id": pool}, "api": {"port": 0, "socket": "off"}, "worker": worker})
    return settings.model_copy(update={"broker": running.broker})


def _secret(file: Path, value: SecretStr) -> str:
    """A file that only this user can read."""
    file.touch(mode=0o600)
    file.write_text(value.get_secret_value())
    return str(file)

"""The demo: a private RabbitMQ, a daemon and real Spark workers answer real requests over TPC-H data.

Run by `make demo`. It tells a story with timings, checks every step of it, ends by itself and leaves nothing running.
Exit code 0: everything happened as described.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from osrdyne.client import AsyncClient, Reply, RequestFailedError
from osrdyne.config.models import Settings
from osrdyne.dev.stack import running_stack, sample_settings
from osrdyne.errors import OsrdyneError
from osrdyne.logs import configure_logging

SMALL, LARGE, MISSING = "tpch/sf=0.001", "tpch/sf=0.01", "tpch/sf=99"
PRICING_SUMMARY = """
select l_returnflag as flag, l_linestatus as status, sum(l_quantity) as quantity, count(*) as items
from lineitem where l_shipdate <= date '1998-09-02' group by l_returnflag, l_linestatus order by flag, status
"""
WARM_CALLS = 20
START_LIMIT = 240.0
IDLE_LIMIT = 120.0
POLL_INTERVAL = 0.5

console = Console(highlight=False, width=110)


class DemoError(Exception):
    """A step did not do what the story says."""


def check(condition: bool, expectation: str) -> None:
    if not condition:
        raise DemoError(expectation)


def chapter(title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


def tell(text: str) -> None:
    console.print(f"  {text}")


@asynccontextmanager
async def timed(what: str) -> AsyncIterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        tell(f"{what}: {time.perf_counter() - started:.1f} s")


def demo_settings() -> Settings:
    """Short delays, so that an idle group ends while you watch, and workers that start fast."""
    return Settings.model_validate(
        {
            "pool": {"id": "demo"},
            "lifecycle": {"unbind_delay": "10s", "stop_delay": "2s", "settle_delay": "1s", "extra_lifetime": "500ms"},
            "api": {"port": 0},
            # Each worker runs for a minute: Java's optimising compiler would use more processor time than it saves.
            "worker": {"spark_conf": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}},
        }
    )


async def ask(client: AsyncClient, key: str, query: str) -> Reply:
    return await client.call(key, "/sql", json.dumps({"query": query}).encode(), timeout=START_LIMIT)


async def first_request(client: AsyncClient) -> None:
    chapter("1. The first request for a key starts its Spark worker")
    tell(f"A client publishes a request to [cyan]demo-req-xchg[/cyan] with the key [cyan]{LARGE}[/cyan].")
    tell("The key has not been used yet: it has no queue and no worker, so the daemon makes both.")
    async with timed("answered, with the time to start Python and Java and to open the tables"):
        reply = await ask(client, LARGE, "select count(*) as items from lineitem")
    items = reply.json()["rows"][0][0]
    check(int(items) == 60_175, f"lineitem at scale 0.01 has 60175 rows, not {items}")
    tell(f"select count(*) from lineitem → [green]{items}[/green], from worker {reply.worker_id}")


async def warm_requests(client: AsyncClient) -> None:
    chapter("2. The next ones go straight to it")
    first = await ask(client, LARGE, PRICING_SUMMARY)
    durations = []
    for _ in range(WARM_CALLS):
        started = time.perf_counter()
        reply = await ask(client, LARGE, PRICING_SUMMARY)
        durations.append(time.perf_counter() - started)
        check(reply.worker_id == first.worker_id, "warm requests are answered by the same worker")
    show_rows(reply)
    tell(f"{WARM_CALLS} calls of TPC-H's pricing summary: median {statistics.median(durations) * 1000:.0f} ms")


def show_rows(reply: Reply) -> None:
    answer = reply.json()
    table = Table(box=None, padding=(0, 2))
    for column in answer["columns"]:
        table.add_column(column["name"], justify="right" if column["type"] != "string" else "left")
    for row in answer["rows"]:
        table.add_row(*(str(value) for value in row))
    console.print(table)


async def another_key(client: AsyncClient, api: str) -> None:
    chapter("3. Another key gets its own worker, and no other key waits for it")
    durations = []
    async with timed(f"{SMALL} started and answered"):
        slow = asyncio.ensure_future(ask(client, SMALL, "select count(*) as items from lineitem"))
        while not slow.done():
            started = time.perf_counter()
            await ask(client, LARGE, "select count(*) from lineitem")
            durations.append(time.perf_counter() - started)
            await asyncio.wait({slow}, timeout=0.5)
        reply = await slow
    tell(f"meanwhile {LARGE} answered {len(durations)} times, median {statistics.median(durations) * 1000:.0f} ms")
    tell(f"select count(*) from lineitem → [green]{reply.json()['rows'][0][0]}[/green]")
    for group in await list_groups(api):
        workers = ", ".join(f"pid {worker['external_id']} {worker['state']}" for worker in group["workers"])
        tell(f"[cyan]{group['key']}[/cyan] is {group['state']}, worker: {workers}")
        for worker in group["workers"]:
            parts = ", ".join(f"{part} {took / 1000:.1f} s" for part, took in worker["cold_start"].items())
            tell(f"  its cold start: {parts}")


async def list_groups(api: str) -> list[dict[str, Any]]:
    """The groups as the daemon's API has them."""
    async with httpx.AsyncClient(base_url=api, trust_env=False, timeout=60.0) as http:
        groups: list[dict[str, Any]] = (await http.get("/v1/groups")).json()["groups"]
        return groups


async def refused_requests(client: AsyncClient) -> None:
    chapter("4. Failures are answered, too")
    for title, query in {
        "a wrong column": "select nope from lineitem",
        "not a query": "drop view lineitem",
        "a file by its path": "select * from csv.`/etc/passwd`",
    }.items():
        try:
            await ask(client, LARGE, query)
        except RequestFailedError as error:
            tell(f"{title}: [yellow]{error}[/yellow]")
        else:
            raise DemoError(f"{query!r} must be refused")


async def missing_data(client: AsyncClient) -> None:
    chapter("5. A key without data")
    tell("A key means nothing to the daemon: a worker starts for it, finds no data, and answers with that error.")
    try:
        async with timed(f"{MISSING} answered"):
            await ask(client, MISSING, "select 1")
    except RequestFailedError as error:
        tell(f"[yellow]{error}[/yellow]")
    else:
        raise DemoError(f"the key {MISSING} has no data and must be answered with an error")


async def idle_groups(api: str) -> None:
    chapter("6. Idle groups go away")
    tell("Without requests a queue is unbound after 10 s here (10 min by default). Once it is proven that no client")
    tell("holds a request of it, its worker stops and the queue is deleted.")
    async with timed("all groups gone"):
        for _ in range(int(IDLE_LIMIT / POLL_INTERVAL)):
            if not await list_groups(api):
                return
            await asyncio.sleep(POLL_INTERVAL)
        raise DemoError(f"idle groups must be gone within {IDLE_LIMIT:g} s")


async def story() -> None:
    console.print("[bold]osrdyne[/bold]: every key has its own warm Spark worker, reached through RabbitMQ.")
    chapter("0. Setting the stage")
    async with timed("TPC-H tables, scale 0.001 and 0.01, as Parquet"):
        settings = await asyncio.to_thread(sample_settings, demo_settings(), scales=("0.001", "0.01"))
    started = time.perf_counter()
    async with running_stack(settings) as running:
        tell(f"RabbitMQ and the daemon are up: {time.perf_counter() - started:.1f} s")
        api = f"http://127.0.0.1:{running.api.port}"
        async with AsyncClient(running.broker.uri.get_secret_value(), "demo") as client:
            await first_request(client)
            await warm_requests(client)
            await another_key(client, api)
            await refused_requests(client)
            await missing_data(client)
        await idle_groups(api)
    chapter("Everything is stopped. Where to look next")
    tell("osrdyne dev                  the same stack, to play with: osrdyne call, osrdyne groups")
    tell("docs/tutorials/first-worker.md     from here to a worker of your own")
    tell("docs/explanation/architecture.md   why no request is lost")


def main() -> int:
    configure_logging(level="error")
    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(story())
    except (OsrdyneError, DemoError, TimeoutError) as error:
        console.print(f"\n[red]The demo failed:[/red] {error or type(error).__name__}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

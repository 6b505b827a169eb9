"""The demo: a private RabbitMQ, a daemon and real Spark workers answer real requests over TPC-H data.

Run by `make demo`. It prints and checks each step with its duration, ends by itself and leaves nothing running. Exit
code 0: all checks passed.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

import httpx
from demo_pooled import pooled_story
from demo_story import DemoError, ask, chapter, check, console, run_demo, tell, timed
from rich.table import Table

from osrdyne.client import AsyncClient, Reply, RequestFailedError
from osrdyne.config.models import Settings
from osrdyne.dev.stack import running_stack, sample_settings

SMALL, LARGE, MISSING = "tpch/sf=0.001", "tpch/sf=0.01", "tpch/sf=99"
PRICING_SUMMARY = """
select l_returnflag as flag, l_linestatus as status, sum(l_quantity) as quantity, count(*) as items
from lineitem where l_shipdate <= date '1998-09-02' group by l_returnflag, l_linestatus order by flag, status
"""
WARM_CALLS = 20
IDLE_LIMIT = 120.0
REPORT_LIMIT = 10.0
POLL_INTERVAL = 0.5


def demo_settings() -> Settings:
    """Short delays, so that idle groups end during the demo, and workers that start fast."""
    return Settings.model_validate(
        {
            "pool": {"id": "demo"},
            "lifecycle": {"unbind_delay": "10s", "stop_delay": "2s", "settle_delay": "1s", "extra_lifetime": "500ms"},
            "api": {"port": 0},
            # Each worker runs for a minute: Java's optimising compiler would use more processor time than it saves.
            "worker": {"spark_conf": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}},
        }
    )


async def first_request(client: AsyncClient, api: str) -> None:
    chapter("1. The first request for a key starts its Spark worker")
    tell(f"A client publishes a request to [cyan]demo-req-xchg[/cyan] with the key [cyan]{LARGE}[/cyan].")
    tell("The key has not been used yet: it has no queue and no worker, so the daemon makes both.")
    async with timed("answered, with the time to start Python and Java and to open the tables"):
        reply = await ask(client, LARGE, "select count(*) as items from lineitem")
    items = reply.json()["rows"][0][0]
    check(int(items) == 60_175, f"lineitem at scale 0.01 has 60175 rows, not {items}")
    tell(f"select count(*) from lineitem → [green]{items}[/green], from worker {reply.worker_id}")
    await show_cold_starts(api)


async def warm_requests(client: AsyncClient) -> None:
    chapter("2. Further requests go directly to this worker")
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
    await show_cold_starts(api)


async def show_cold_starts(api: str) -> None:
    """Print the parts of each cold start, as the workers report them; that of the first query after its answer."""
    for _ in range(int(REPORT_LIMIT / POLL_INTERVAL)):
        groups = await list_groups(api)
        if all("first_query" in worker["cold_start"] for group in groups for worker in group["workers"]):
            break
        await asyncio.sleep(POLL_INTERVAL)
    for group in groups:
        for worker in group["workers"]:
            parts = ", ".join(f"{part} {took / 1000:.1f} s" for part, took in worker["cold_start"].items())
            tell(f"cold start of [cyan]{group['key']}[/cyan] in parts:")
            tell(f"  {parts}")


async def list_groups(api: str) -> list[dict[str, Any]]:
    """The groups from the daemon's API."""
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
    tell("The daemon does not interpret keys: a worker starts, finds no data for its key, and answers with that error.")
    try:
        async with timed(f"{MISSING} answered"):
            await ask(client, MISSING, "select 1")
    except RequestFailedError as error:
        tell(f"[yellow]{error}[/yellow]")
    else:
        raise DemoError(f"the key {MISSING} has no data and must be answered with an error")


async def idle_groups(api: str) -> None:
    chapter("6. Idle groups end")
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
    chapter("0. Start")
    async with timed("TPC-H tables, scale 0.001 and 0.01, as Parquet"):
        settings = await asyncio.to_thread(sample_settings, demo_settings(), scales=("0.001", "0.01"))
    started = time.perf_counter()
    async with running_stack(settings) as running:
        tell(f"RabbitMQ and the daemon are up: {time.perf_counter() - started:.1f} s")
        api = f"http://127.0.0.1:{running.api.port}"
        async with AsyncClient(running.broker.uri.get_secret_value(), "demo") as client:
            await first_request(client, api)
            await warm_requests(client)
            await another_key(client, api)
            await refused_requests(client)
            await missing_data(client)
        await idle_groups(api)
    await pooled_story(first_chapter=7)
    chapter("Everything is stopped. Where to look next")
    tell("osrdyne dev                  the same stack, for your own requests: osrdyne call, osrdyne groups")
    tell("docs/tutorials/first-worker.md     from here to a worker of your own")
    tell("docs/reference/workers/pooled.md   what pooled keys share, and what they do not")
    tell("docs/explanation/architecture.md   why no request is lost")


if __name__ == "__main__":
    sys.exit(run_demo(story()))

"""The part of the demo about pooled workers: a spare process, and fifty keys that share one process. Used by `demo`."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import httpx
from demo_story import START_LIMIT, ask, chapter, check, tell, timed

from osrdyne.client import AsyncClient
from osrdyne.config.models import Settings
from osrdyne.dev.sample_data import default_directory
from osrdyne.dev.stack import running_stack, sample_settings

POOL = "demo_pooled"
KEYS = [f"customer={number}" for number in range(1, 51)]
QUERY = "select min(o_custkey) as customer, count(*) as orders from orders"
AT_ONCE = 4
"""Keys whose first requests are sent together."""
MIB = 2**20


def demo_settings() -> Settings:
    """One process for all keys. It is the spare until the first key is placed in it."""
    pooled = {"keys_per_process": len(KEYS), "spares": 1, "max_processes": 1}
    settings = Settings.model_validate(
        {
            "pool": {"id": POOL},
            "api": {"port": 0},
            "worker": {
                "placement": "pooled",
                "pooled": pooled,
                "spark_conf": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"},
            },
        }
    )
    sample = sample_settings(settings, scales=("0.001",))
    return sample.model_copy(update={"worker": sample.worker.model_copy(update={"config": _data()})})


def _data() -> dict[str, object]:
    """Each key sees the orders of one customer, and the tables that all customers share."""
    orders = {"view": "orders", "path": "tpch/sf=0.001/orders.parquet", "filters": {"o_custkey": "{number}"}}
    shared = [{"view": table, "path": f"tpch/sf=0.001/{table}.parquet"} for table in ("customer", "nation", "part")]
    dataset = {"key": "customer={number}", "tables": [orders, *shared]}
    return {"base_directory": str(default_directory()), "datasets": [dataset]}


async def pooled_story(first_chapter: int) -> None:
    """Two chapters, on a stack of their own."""
    settings = await asyncio.to_thread(demo_settings)
    async with running_stack(settings) as running:
        api = f"http://127.0.0.1:{running.api.port}"
        async with AsyncClient(running.broker.uri.get_secret_value(), POOL) as client:
            await spare(client, api, first_chapter)
            await fifty_keys(client, api, first_chapter + 1)


async def spare(client: AsyncClient, api: str, number: int) -> None:
    chapter(f"{number}. Pooled workers: a spare process answers a new key at once")
    tell("With worker.placement: pooled, keys share processes. A spare is started before any key needs it.")
    async with timed("the spare is ready, with the time to start Python, Java and Spark"):
        process = await _process(api, state="spare")
    before = process["memory"]
    started = time.perf_counter()
    await _answer(client, KEYS[0])
    tell(f"first answer of the new key [cyan]{KEYS[0]}[/cyan]: {time.perf_counter() - started:.2f} s")
    if before is not None:
        tell(f"memory of the process before its first key: {before / MIB:.0f} MiB")


async def fifty_keys(client: AsyncClient, api: str, number: int) -> None:
    chapter(f"{number}. {len(KEYS)} keys in this process, each with its own session, views and state")
    took = []
    turns = asyncio.Semaphore(AT_ONCE)

    async def first_answer(key: str) -> None:
        async with turns:
            began = time.perf_counter()
            await _answer(client, key)
            took.append(time.perf_counter() - began)

    async with timed(f"{len(KEYS) - 1} further keys have answered from their own orders"):
        await asyncio.gather(*map(first_answer, KEYS[1:]))
    tell(f"first answer of a key: median {statistics.median(took):.2f} s, with {AT_ONCE} new keys at a time")
    async with timed("one request to each key, all at once"):
        await asyncio.gather(*(_answer(client, key) for key in KEYS))
    process = await _process(api, keys=len(KEYS))
    check(len(process["keys"]) == len(KEYS), f"{len(KEYS)} keys are in one process, not {len(process['keys'])}")
    tell(f"process {process['external_id']} has {len(process['keys'])} keys and served {process['requests']} requests")
    if process["memory"] is not None:
        per_key = process["memory"] / len(process["keys"]) / MIB
        tell(f"its memory with its JVM: {process['memory'] / MIB:.0f} MiB, [green]{per_key:.0f} MiB per key[/green]")
    if process["heap_used"] is not None:
        tell(f"heap in use: {process['heap_used'] / MIB:.0f} of {process['heap_max'] / MIB:.0f} MiB")


async def _answer(client: AsyncClient, key: str) -> None:
    """Ask for the orders of the key, which must be those of its own customer. A third of the customers have none."""
    [[customer, orders]] = (await ask(client, key, QUERY)).json()["rows"]
    expected = key.removeprefix("customer=")
    check(customer is None or str(customer) == expected, f"{key} sees its own orders, not those of {customer}")
    check((customer is None) == (int(orders) == 0), f"{key} has orders of a customer")


async def _process(api: str, *, state: str | None = None, keys: int = 0) -> dict[str, Any]:
    """The only process, once it has this state and reports so many keys."""
    until = time.perf_counter() + START_LIMIT
    async with httpx.AsyncClient(base_url=api, trust_env=False, timeout=60.0) as http:
        while True:
            found: list[dict[str, Any]] = (await http.get("/v1/processes")).json()["processes"]
            for process in found:
                if state in (None, process["state"]) and len(process["keys"]) >= keys:
                    return process
            check(time.perf_counter() < until, "a process with all keys is ready in time")
            await asyncio.sleep(0.2)

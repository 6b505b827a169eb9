"""The demo of priorities: alerts overtake a backlog of data on a real Spark worker, and routes change while it works.

Run by `make demo-priorities`. It prints and checks each step, ends by itself and leaves nothing running. Exit code 0:
all checks passed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx
from demo_story import START_LIMIT, chapter, check, console, run_demo, tell

from osrdyne.client import AsyncClient
from osrdyne.config.models import Settings
from osrdyne.dev.stack import running_stack, sample_settings

KEY = "tpch/sf=0.001"
QUERY = json.dumps({"query": "select l_returnflag, sum(l_quantity) from lineitem group by l_returnflag"}).encode()
BACKLOG, ALERTS = 20, 3
ROUTES = {
    "routes": {
        "alerts": {"route": "FROM /messages/modules/camera/outputs/alerts INTO $upstream", "priority": 0},
        "data": {"route": "FROM /messages/modules/camera/outputs/data INTO $upstream", "priority": 5},
        "rest": "FROM /messages/* INTO $upstream",
    }
}
CHANGED_ROUTES = {
    "routes": {
        "urgent": {"route": "FROM /messages/* WHERE level = 'urgent' INTO $upstream", "priority": 1},
        "rest": "FROM /messages/* INTO $upstream",
    }
}


class Camera:
    """Sends requests, and records the order of the answers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self.answered: list[str] = []
        self.under_way = asyncio.Event()
        """Set once a request is answered."""

    def send(self, name: str, **headers: str) -> None:
        async def call() -> None:
            await self._client.call(KEY, "/sql", QUERY, timeout=START_LIMIT, headers=headers)
            self.answered.append(name)
            self.under_way.set()

        self._tasks.append(asyncio.create_task(call()))

    async def all_answered(self) -> None:
        await asyncio.gather(*self._tasks)
        self._tasks.clear()


async def apply(api: str, manifest: object) -> None:
    async with httpx.AsyncClient(base_url=api, trust_env=False) as http:
        answer = await http.put("/v1/routes", json=manifest, params={"author": "demo"})
        check(answer.is_success, f"the routes are accepted, not answered {answer.text}")


def overtaken(camera: Camera, first: str) -> int:
    """The number of requests that were answered before the last one whose name begins with `first`."""
    return max(place for place, name in enumerate(camera.answered) if name.startswith(first))


async def alerts_overtake(camera: Camera) -> None:
    chapter(f"1. {BACKLOG} requests with data wait, then {ALERTS} alerts come")
    for number in range(BACKLOG):
        camera.send(f"data {number}", **{"x-output": "data"})
    await camera.under_way.wait()
    before = len(camera.answered)
    began = time.perf_counter()
    for number in range(ALERTS):
        camera.send(f"alert {number}", **{"x-output": "alerts"})
    await camera.all_answered()
    last = overtaken(camera, "alert")
    tell(f"order of the answers: {' '.join(name[0] for name in camera.answered)}")
    tell(f"{before} were answered when the alerts were sent; the last alert was number {last + 1}")
    tell(f"everything took {time.perf_counter() - began:.1f} s")
    check(last < BACKLOG // 2, "alerts overtake the backlog")
    alerts = [name for name in camera.answered if name.startswith("alert")]
    check(alerts == [f"alert {number}" for number in range(ALERTS)], "alerts keep their own order")


async def routes_change(camera: Camera, api: str) -> None:
    chapter("2. The routes change while requests wait")
    camera.answered.clear()
    camera.under_way.clear()
    for number in range(BACKLOG):
        camera.send(f"data {number}", **{"x-output": "data"})
    await camera.under_way.wait()
    await apply(api, CHANGED_ROUTES)
    for number in range(ALERTS):
        camera.send(f"urgent {number}", level="urgent")
    await camera.all_answered()
    tell("a header decides now: FROM /messages/* WHERE level = 'urgent' INTO $upstream, priority 1")
    tell(f"order of the answers: {' '.join(name[0] for name in camera.answered)}")
    check(overtaken(camera, "urgent") < BACKLOG // 2, "urgent requests of the new route overtake waiting ones")


async def story() -> None:
    console.print("[bold]osrdyne[/bold]: routes set the priorities of requests in a managed pool.")
    chapter("0. Start")
    base = Settings.model_validate({"pool": {"id": "demo_pri", "kind": "managed"}, "api": {"port": 0}})
    settings = await asyncio.to_thread(sample_settings, base, scales=("0.001",))
    async with running_stack(settings) as running:
        api = f"http://127.0.0.1:{running.api.port}"
        await apply(api, ROUTES)
        async with AsyncClient(running.broker.uri.get_secret_value(), "demo_pri", name="camera") as client:
            started = time.perf_counter()
            await client.call(KEY, "/sql", QUERY, timeout=START_LIMIT)
            tell(f"the Spark worker of {KEY} is up: {time.perf_counter() - started:.1f} s")
            camera = Camera(client)
            await alerts_overtake(camera)
            await routes_change(camera, api)
    console.print("\n[bold]Everything is stopped.[/bold] See docs/reference/routes.")


if __name__ == "__main__":
    sys.exit(run_demo(story()))

"""The demo of protection: a circuit opens and recovers, a policy clamps a proposal, a quota runs out as predicted.

Run by `make demo-protection`. It prints and checks each step, ends by itself and leaves nothing running. Exit code 0:
all checks passed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
from demo_story import START_LIMIT, DemoError, chapter, check, console, run_demo, tell

from osrdyne.client import AsyncClient, QuotaExceededError, RequestError
from osrdyne.config.models import Settings
from osrdyne.dev.stack import running_stack

T = TypeVar("T")

POOL = "demo_protection"
ROUTE = "billing"
KEYS = [f"customer-{number}" for number in range(1, 5)]
SAMPLES = 20
CIRCUITS = {
    "statisticsUpdateEnabled": True,
    "circuitCheckEnabled": True,
    "errorThresholdPercentage": 50,
    "minQueueSampleCount": SAMPLES,
    "openToHalfOpen": {"enabled": True, "interval": 4000},
    "unlockSampleQueues": {"enabled": True, "interval": 30_000},
    "unlockQueues": {"enabled": True, "interval": 1000},
}
KEY = "device-7"
MESSAGE_BYTES = 32 * 1024
RATE = 10  # Messages a second.
REFUSED = 5  # Messages that are sent after the quota is used up.


async def request(api: httpx.AsyncClient, method: str, path: str, body: object = None, **params: str) -> Any:
    """The answer of the HTTP API as JSON."""
    answer = await api.request(method, path, json=body, params=params)
    check(answer.is_success, f"{method} {path} succeeds, and is not answered {answer.text}")
    return answer.json()


async def until(condition: Callable[[], Awaitable[T | None]], what: str) -> T:
    """The first value of `condition` that is not None."""
    end = time.perf_counter() + START_LIMIT
    while (found := await condition()) is None:
        check(time.perf_counter() < end, what)
        await asyncio.sleep(0.05)
    return found


async def circuit_opens_and_recovers(api: httpx.AsyncClient, client: AsyncClient) -> None:
    chapter(f"1. A backend fails: its circuit opens after {SAMPLES} failures, and recovers by a probe")
    await request(api, "PUT", "/v1/routes", {"routes": {ROUTE: "FROM /messages/* INTO $upstream"}}, author="demo")
    await request(api, "PUT", "/v1/circuits/config", CIRCUITS, author="demo")
    began = time.perf_counter()

    def now() -> str:
        return f"{time.perf_counter() - began:5.1f} s"

    async def status(wanted: str) -> dict[str, Any] | None:
        circuits = (await request(api, "GET", "/v1/circuits/_all"))["circuits"]
        return next((one for one in circuits if one["route"] == ROUTE and one["status"] == wanted), None)

    for number in range(SAMPLES):
        answer = await asyncio.gather(client.call(KEYS[number % len(KEYS)], "/fail"), return_exceptions=True)
        check(isinstance(answer[0], RequestError), "the backend fails")
    opened = await until(lambda: status("open"), "the circuit opens")
    tell(f"{now()}: {opened['failures']} of {SAMPLES} requests have failed, the circuit of {ROUTE!r} is open")
    check(opened["failures"] == SAMPLES, f"it opens at the failure number {SAMPLES}")

    tell(f"{now()}: the backend works again; {len(KEYS)} clients send requests, which wait")
    answered: list[str] = []

    async def ask(key: str) -> None:
        await client.call(key, "/echo", b"", timeout=START_LIMIT)
        answered.append(key)
        tell(f"{now()}: the request of {key} is answered")

    waiting = [asyncio.create_task(ask(key)) for key in KEYS]
    await until(lambda: status("closed"), "the circuit closes")
    tell(f"{now()}: the probe was one of them: it succeeded, the circuit is closed, and the groups go on one by one")
    await asyncio.gather(*waiting)
    check(sorted(answered) == sorted(KEYS), "every request is answered")


async def proposal_is_clamped(api: httpx.AsyncClient) -> None:
    chapter("2. A client proposes a policy for its queue, beyond the bounds of the pool")
    proposal = {"MaxMessageSize": "1GiB", "MaxMessageAge": "90d", "MaxQueueLength": 500}
    tell(f"proposed: {', '.join(f'{name} {value}' for name, value in proposal.items())}")
    answer = await request(api, "POST", "/v1/queues", proposal, key=KEY, author="demo")
    elements = answer["elements"]
    for name in proposal:
        tell(f"{name:15} {elements[name]['value']!s:>10}   {elements[name]['origin']}")
    origins = [elements[name]["origin"] for name in proposal]
    check(origins == ["clamped", "clamped", "proposed"], "the pool moves two values to its bounds, and keeps one")
    computed = elements["MaxQueueCapacity"]
    tell(f"MaxQueueCapacity {computed['value']!s:>9}   {computed['origin']}")
    check(computed["origin"] == "computed", "the capacity follows from length and size")


async def quota_runs_out(api: httpx.AsyncClient, client: AsyncClient) -> None:
    chapter("3. A daily quota runs out when `osrdyne capacity` says that it does")
    load = [{"rate": f"{RATE}/s", "message_size": MESSAGE_BYTES}]
    plan = await request(api, "POST", "/v1/capacity", {"load": load, "hub": "iot-hub-free"})
    (blocks,) = (meter for meter in plan["meters"] if meter["meter"] == "blocks a day")
    predicted = float(blocks["gives_out"])
    expected = round(blocks["limit"] / (MESSAGE_BYTES / 512))
    tell(f"{RATE} messages of 32 KiB a second, {blocks['limit']:,.0f} blocks of 512 bytes a day")
    tell(f"predicted: {expected} messages are accepted, and the quota is used up after {predicted:.1f} s")
    await request(api, "PUT", "/v1/quota", {"pool": {"preset": "iot-hub-free"}}, author="demo")

    body = bytes(MESSAGE_BYTES)
    began = time.perf_counter()
    sent: list[float] = []
    calls: list[asyncio.Task[object]] = []
    for number in range(expected + REFUSED):
        # At a fixed rate: a late message does not delay the next one.
        await asyncio.sleep(max(0.0, began + number / RATE - time.perf_counter()))
        sent.append(time.perf_counter() - began)
        calls.append(asyncio.create_task(client.call(KEY, "/echo", body, timeout=START_LIMIT)))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [number for number, answer in enumerate(answers) if isinstance(answer, BaseException)]
    check(
        refused == list(range(expected, expected + REFUSED)), f"the first {expected} messages are accepted, and no more"
    )
    refusal = answers[expected]
    if not isinstance(refusal, QuotaExceededError):
        raise DemoError(f"the answer is quota-exceeded, not {refusal}")
    tell(f"measured:  {expected} messages were accepted; the next one, sent after {sent[expected]:.1f} s, was refused")
    tell(f"its answer: quota-exceeded, try again in {(refusal.retry_after or 0) / 3600:.1f} h, at 00:00 UTC")


async def story() -> None:
    console.print("[bold]osrdyne[/bold]: circuits, policies and quotas protect a managed pool and its backends.")
    chapter("0. Start")
    settings = Settings.model_validate(
        {
            "pool": {"id": POOL, "kind": "managed"},
            "worker": {"app": "workers.examples.echo:app"},
            "api": {"port": 0},
        }
    )
    async with running_stack(settings) as running:
        base = f"http://127.0.0.1:{running.api.port}"
        async with (
            httpx.AsyncClient(base_url=base, trust_env=False) as api,
            AsyncClient(running.broker.uri.get_secret_value(), POOL, name="device") as client,
        ):
            started = time.perf_counter()
            await client.call(KEY, "/echo", b"", timeout=START_LIMIT)
            tell(f"the worker of {KEY} is up: {time.perf_counter() - started:.1f} s")
            await circuit_opens_and_recovers(api, client)
            await proposal_is_clamped(api)
            await quota_runs_out(api, client)
    console.print("\n[bold]Everything is stopped.[/bold] See docs/how-to/limit-what-clients-send.md.")


if __name__ == "__main__":
    sys.exit(run_demo(story()))

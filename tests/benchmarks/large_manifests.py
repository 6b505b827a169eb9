"""What large manifests cost a leading daemon: how long an apply takes, and how long the event loop stands still.

    python -m tests.benchmarks.large_manifests [ROUTES ...]

A daemon of its own leads a managed pool on its own RabbitMQ. While manifests are applied and their history is read,
a second client asks for `/health` without a pause: the longest wait for an answer is how long nothing else of the
daemon was done. The leader's connection is given up after three heartbeats of two seconds. Runs from the root of a
checkout, so that another version of the product can be measured with the same file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.logs import configure_logging

ROUTES = (1_000, 5_000, 10_000)
VERSIONS = 5
"""Applied one after the other, each with one route more than the one before."""
PATIENCE = 300.0
CONDITIONS = (
    "level = 'x{n}' AND $body.celsius > {n}",
    "as_number(size) > 1{n:03} AND $body.celsius >= 1{n:03}",
    "starts_with(site, 'x{n}') AND $body.name = '{n}'",
)


def manifest(routes: int) -> dict[str, object]:
    found = {
        f"route{number}": {
            "route": f"FROM /messages/* WHERE {CONDITIONS[number % 3].format(n=number)} INTO $upstream",
            "priority": number % 3,
        }
        for number in range(routes)
    }
    return {"routes": found}


class Watcher(threading.Thread):
    """Asks for `/health` again and again, on a connection of its own, and keeps the longest wait."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._ended = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        with httpx.Client(timeout=PATIENCE) as client:
            while not self._ended.wait(0.01):
                began = time.perf_counter()
                client.get(f"{self._url}/health")
                self.longest = max(self.longest, time.perf_counter() - began)

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.longest


@contextlib.contextmanager
def watched(url: str, row: dict[str, float], name: str) -> Iterator[None]:
    watcher = Watcher(url)
    watcher.start()
    began = time.perf_counter()
    try:
        yield
    finally:
        row[f"{name}_s"] = round(time.perf_counter() - began, 2)
        row[f"{name}_longest_stall_s"] = round(watcher.end(), 2)


def measure(url: str, routes: int) -> dict[str, float]:
    row: dict[str, float] = {"routes": routes}
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:

        def apply(count: int) -> None:
            answer = client.put("/v1/routes", params={"author": "bench"}, json=manifest(count))
            if answer.status_code != httpx.codes.OK:
                raise SystemExit(f"{count} routes: {answer.status_code} {answer.text[:300]}")

        with watched(url, row, "first_apply"):
            apply(routes)
        for version in range(1, VERSIONS):
            with watched(url, row, "apply_with_one_change"):
                apply(routes + version)
        with watched(url, row, "history"):
            client.get("/v1/routes/history").raise_for_status()
        row["terms"] = client.get("/v1/leadership").json()["term"]
    return row


async def start(broker: EmbeddedBroker, directory: str, port: int) -> asyncio.subprocess.Process:
    settings = {
        "BROKER__URI": broker.amqp_uri,
        "BROKER__MANAGEMENT_URI": broker.management_uri,
        "POOL__ID": "bench_manifests",
        "POOL__KIND": "managed",
        "DRIVER__NAME": "noop",
        "API__PORT": str(port),
        "LOG__LEVEL": "warning",
    }
    environment = {**os.environ, "XDG_RUNTIME_DIR": directory, "HOME": directory}
    environment |= {f"OSRDYNE__{name}": value for name, value in settings.items()}
    environment["PYTHONPATH"] = str(Path.cwd())
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "osrdyne.cli.main", "run", cwd=directory, env=environment
    )


async def until_leading(url: str) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/v1/leadership")).json()["leading"]:
                    return
            await asyncio.sleep(0.1)


async def run(sizes: list[int]) -> list[dict[str, float]]:
    rows = []
    for size in sizes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        async with EmbeddedBroker() as broker:
            with tempfile.TemporaryDirectory(prefix="osr-") as directory:
                daemon = await start(broker, directory, port)
                try:
                    await until_leading(f"http://127.0.0.1:{port}")
                    rows.append(await asyncio.to_thread(measure, f"http://127.0.0.1:{port}", size))
                finally:
                    daemon.terminate()
                    await daemon.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="What large manifests cost a leading daemon.")
    parser.add_argument("routes", nargs="*", type=int, metavar="ROUTES", help=f"sizes (default: {ROUTES})")
    configure_logging(level="error")
    rows = asyncio.run(run(parser.parse_args().routes or list(ROUTES)))
    sys.stdout.write(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

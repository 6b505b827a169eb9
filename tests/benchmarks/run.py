"""`make bench`: run the benchmarks on a RabbitMQ of their own; JSON on stdout, a table on stderr.

A missed goal is reported and is no failure: the machine may be busy, or slow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable

import uvloop

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.logs import configure_logging
from tests.benchmarks import (
    activation,
    cold_start,
    driver_starts,
    echo,
    ingress,
    last_values,
    leader_change,
    listings,
    pooled,
    priorities,
    quotas,
    spark_query,
    start,
    streams,
    takeover,
    telemetry,
    telemetry_ingest,
    telemetry_paths,
    tracker,
)
from tests.benchmarks.figures import Figure, table

BENCHMARKS: dict[str, Callable[[EmbeddedBroker], Awaitable[list[Figure]]]] = {
    "tracker": tracker.run,
    "quotas": quotas.run,
    "echo": echo.run,
    "priorities": priorities.run,
    "activation": activation.run,
    "ingress": ingress.run,
    "telemetry": telemetry.run,
    "takeover": takeover.run,
    "leaders": leader_change.run,
    "listings": listings.run,
    "start": start.run,
    "drivers": driver_starts.run,
    "spark": spark_query.run,
    "cold_start": cold_start.run,
    "streams": streams.run,
    "ingest": telemetry_ingest.run,
    "last_values": last_values.run,
    "paths": telemetry_paths.run,
    "pooled": pooled.run,
    "killed": pooled.run_killed,
}

TOGETHER = {
    "spark": ("spark", "cold_start", "streams", "pooled", "killed"),
    "telemetry": ("telemetry", "last_values", "ingest", "paths"),
    "pooled": ("pooled", "killed"),
}
"""Names that stand for several benchmarks, if they are asked for by name."""


async def run(names: list[str]) -> list[Figure]:
    figures: list[Figure] = []
    async with EmbeddedBroker() as broker:
        for name in names:
            sys.stderr.write(f"{name} …\n")
            figures += await BENCHMARKS[name](broker)
    return figures


def report(figures: list[Figure]) -> dict[str, object]:
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    return {"machine": machine, "figures": [figure.to_json() for figure in figures]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description="Figures beside their bare floors.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    names: list[str] = parser.parse_args().names or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    wanted = dict.fromkeys(one for name in names for one in TOGETHER.get(name, (name,)))
    configure_logging(level="error")
    figures = uvloop.run(run(list(wanted)))
    sys.stderr.write(f"\n{table(figures)}\n")
    sys.stdout.write(json.dumps(report(figures), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

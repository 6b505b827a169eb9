"""`make bench`: run the benchmarks on a RabbitMQ of their own; JSON on stdout, a table on stderr.

A missed goal is reported and is no failure: the machine may be busy, or slow.
"""

import argparse
import json
import os
import platform
import sys
from importlib import import_module

import uvloop

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.logs import configure_logging
from tests.benchmarks.figures import Figure, table

MODULES = {
    "leaders": "leader_change",
    "drivers": "driver_starts",
    "spark": "spark_query",
    "ingest": "telemetry_ingest",
    "paths": "telemetry_paths",
    "killed": "pooled",
    "misbehaving": "pooled",
}
"""Of the benchmarks whose module has another name; a second one in a module is its function `run_NAME`."""
TOGETHER = {
    "spark": ("spark", "cold_start", "streams", "pooled", "killed", "misbehaving"),
    "telemetry": ("telemetry", "last_values", "ingest", "paths"),
    "pooled": ("pooled", "killed", "misbehaving"),
}
"""Names that stand for several benchmarks, if they are asked for by name."""
REQUESTS = ("tracker", "quotas", "echo", "priorities", "activation", "ingress")
DAEMONS = ("takeover", "leaders", "listings", "start", "drivers")
NAMES = [*REQUESTS, *DAEMONS, *TOGETHER["telemetry"], *TOGETHER["spark"]]


async def run(names: list[str]) -> list[Figure]:
    figures: list[Figure] = []
    async with EmbeddedBroker() as broker:
        for name in names:
            sys.stderr.write(f"{name} …\n")
            module = import_module(f"tests.benchmarks.{MODULES.get(name, name)}")
            figures += await getattr(module, f"run_{name}", module.run)(broker)
    return figures


def report(figures: list[Figure]) -> dict[str, object]:
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    return {"machine": machine, "figures": [figure.to_json() for figure in figures]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description="Figures beside their bare floors.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)} (default: all)")
    names: list[str] = parser.parse_args().names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    wanted = dict.fromkeys(one for name in names for one in TOGETHER.get(name, (name,)))
    configure_logging(level="error")
    figures = uvloop.run(run(list(wanted)))
    sys.stderr.write(f"\n{table(figures)}\n")
    sys.stdout.write(json.dumps(report(figures), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

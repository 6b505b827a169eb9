"""Starts per second of fifty groups at once, by driver, beside the backend alone.

A backend that is not here is named on stderr, and there is no figure of it.
"""

from __future__ import annotations

import sys

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from tests.benchmarks import starts_docker, starts_kubernetes, starts_subprocess, starts_systemd
from tests.benchmarks.figures import Figure
from tests.benchmarks.starts import NotMeasuredError

BACKENDS = (starts_subprocess.run, starts_docker.run, starts_systemd.run, starts_kubernetes.run)


async def run(_broker: EmbeddedBroker) -> list[Figure]:
    figures = []
    for measured in BACKENDS:
        try:
            figures.append(await measured())
        except NotMeasuredError as reason:
            sys.stderr.write(f"{reason}\n")
    return figures

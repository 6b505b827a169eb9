"""Whether the application of the workers can be imported and accepts `worker.config`, before anything starts.

The worker's own program is asked, in a process of its own: what an import does to a process stays there, and no Spark
starts. Used by `osrdyne dev`, `run` and `check-config`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial

from osrdyne.config.models import Settings
from osrdyne.drivers.registry import worker_command
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.environment import PLACEMENT_VARIABLE

TIMEOUT = 60.0  # An import that takes longer is left to the workers.
# Options of the driver with which workers may find other modules than this process does.
FOREIGN_OPTIONS = ("command", "cwd", "environment")


def check_app(settings: Settings) -> None:
    """Raises `ConfigurationError` with the worker's own sentence when its application or `worker.config` is wrong."""
    start_check(settings)()


def start_check(settings: Settings) -> Callable[[], None]:
    """Start the check beside this process; the result waits for it and raises what `check_app` raises.

    In a pooled pool the application must be poolable. Workers that start elsewhere, or with options by which they may
    find other modules, are not judged; nor is the default application that runs dedicated and without a configuration.
    """
    driver, untouched = settings.driver, type(settings.worker)()
    elsewhere = driver.name != "subprocess" or any(name in driver.options for name in FOREIGN_OPTIONS)
    placements = {settings.worker.placement, *(profile.placement for profile in settings.worker.profiles)}
    pooled = "pooled" in placements
    is_untouched = (settings.worker.app, settings.worker.config) == (untouched.app, untouched.config)
    if elsewhere or (is_untouched and not pooled):
        return lambda: None
    *program, app = worker_command(settings.worker.app)
    process = subprocess.Popen(
        [*program, "--check", app],
        # In the environment as for a worker: the configuration may hold secrets, and a command line is public.
        env={
            **os.environ,
            "WORKER_CONFIG": json.dumps(settings.worker_config()),
            PLACEMENT_VARIABLE: "pooled" if pooled else "dedicated",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return partial(_result, process)


def _result(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return
    if process.returncode != 0:
        said = output.strip().splitlines() or ["osrdyne-worker: it cannot be imported"]
        sentence = said[-1].removeprefix("osrdyne-worker: ")
        raise ConfigurationError(sentence if "worker.config" in sentence else f"worker.app: {sentence}")

"""Check, before anything starts, that the application of the workers can be imported and accepts `worker.config`.

The check runs the worker's program with `--check` in a process of its own, without Spark, so that side effects of the
import stay there. Used by `osrdyne dev`, `run`, `doctor` and `check-config`.
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

TIMEOUT = 60.0  # An import that takes longer is not checked.
# Options of the driver with which workers may find other modules than this process does.
FOREIGN_OPTIONS = ("command", "cwd", "environment")


def check_app(settings: Settings) -> None:
    """Raises `ConfigurationError` with the message of the worker if its application or `worker.config` is invalid."""
    start_check(settings)()


def start_check(settings: Settings) -> Callable[[], None]:
    """Start the check in the background. The returned function waits for it and raises the errors of `check_app`.

    With pooled placement the application must be poolable. Nothing is checked for workers that start elsewhere or with
    options by which they may find other modules, and for the dedicated default application without a configuration.
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
        # In the environment, as for a worker: the configuration may hold secrets, and command lines are public.
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
        lines = output.strip().splitlines() or ["osrdyne-worker: it cannot be imported"]
        sentence = lines[-1].removeprefix("osrdyne-worker: ")
        raise ConfigurationError(sentence if "worker.config" in sentence else f"worker.app: {sentence}")

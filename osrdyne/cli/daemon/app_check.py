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
OWN_APPS = "osrdyne_worker."  # The modules of the applications that come with osrdyne.
# Options of the driver with which workers may find other modules than this process does.
FOREIGN_OPTIONS = ("command", "cwd", "environment")


def check_app(settings: Settings) -> None:
    """Raises `ConfigurationError` with the message of the worker if its application or `worker.config` is invalid."""
    start_check(settings)()


def start_check(settings: Settings) -> Callable[[], None]:
    """Start the check in the background. The returned function waits for it and raises the errors of `check_app`.

    With pooled placement the application must be poolable. Nothing is checked for workers that start elsewhere or with
    options by which they may find other modules, and for the dedicated default application without a configuration,
    unless `SPARK_HOME` may name a Spark that does not fit.
    """
    untouched = type(settings.worker)()
    is_untouched = (settings.worker.app, settings.worker.config) == (untouched.app, untouched.config)
    needs_none = is_untouched and not _is_pooled(settings) and not os.environ.get("SPARK_HOME")
    if _is_elsewhere(settings) or needs_none:
        return lambda: None
    return partial(_result, _start(settings))


def start_check_of_own_app(settings: Settings) -> Callable[[], str | None]:
    """Start the check of `worker.config` for workers that start elsewhere, if their application is one of osrdyne's.

    The returned function waits for it, and returns a warning: the workers may have another version.
    """
    if not _is_elsewhere(settings) or not settings.worker.config or not settings.worker.app.startswith(OWN_APPS):
        return lambda: None
    process = _start(settings)

    def result() -> str | None:
        try:
            _result(process)
        except ConfigurationError as error:
            # Any other problem is about this environment, which may lack Spark.
            return error.message if "worker.config." in error.message else None
        return None

    return result


def _is_elsewhere(settings: Settings) -> bool:
    driver = settings.driver
    return driver.name != "subprocess" or any(name in driver.options for name in FOREIGN_OPTIONS)


def _is_pooled(settings: Settings) -> bool:
    return "pooled" in {settings.worker.placement, *(profile.placement for profile in settings.worker.profiles)}


def _start(settings: Settings) -> subprocess.Popen[str]:
    *program, app = worker_command(settings.worker.app)
    return subprocess.Popen(
        [*program, "--check", app],
        # In the environment, as for a worker: the configuration may hold secrets, and command lines are public.
        env={
            **os.environ,
            "WORKER_CONFIG": json.dumps(settings.worker_config()),
            PLACEMENT_VARIABLE: "pooled" if _is_pooled(settings) else "dedicated",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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
        has_place = "worker.config" in sentence or sentence.startswith("SPARK_HOME")
        raise ConfigurationError(sentence if has_place else f"worker.app: {sentence}")

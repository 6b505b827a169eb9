"""Whether the application of `osrdyne dev` can be imported, before anything starts.

The worker's own program is asked, in a process of its own: what an import does to a process stays there, and no Spark
starts.
"""

from __future__ import annotations

import subprocess

from osrdyne.config.models import Settings
from osrdyne.drivers.registry import worker_command
from osrdyne.errors import ConfigurationError

TIMEOUT = 60.0
"""An import that takes longer is left to the workers."""


def check_app(settings: Settings) -> None:
    """Raises `ConfigurationError` with the worker's own sentence when its application cannot be imported.

    Workers that start with other options than the default ones may find other modules, and are not judged.
    """
    if settings.driver.name != "subprocess" or settings.driver.options:
        return
    *program, app = worker_command(settings.worker.app)
    try:
        done = subprocess.run([*program, "--check", app], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it cannot be imported"]
        raise ConfigurationError(f"worker.app: {said[-1].removeprefix('osrdyne-worker: ')}")

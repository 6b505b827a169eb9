"""Runs a program of osrdyne that kills itself at one moment of the first change through its API.

Arguments: the program and its own arguments. `KILL_AT` names the moment, one of `MOMENTS`; without it the program
ends as usual.
"""

import os
import runpy
import signal
import sys
from typing import Any

from osrdyne.daemon.inspector import DaemonInspector
from osrdyne.pool.routing.manifest_store import ManifestChange

change_manifest = DaemonInspector.change_manifest


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def change_nothing(inspector: DaemonInspector, *arguments: Any, **named: Any) -> ManifestChange:
    die()
    return await change_manifest(inspector, *arguments, **named)


async def change_and_die(inspector: DaemonInspector, *arguments: Any, **named: Any) -> ManifestChange:
    changed = await change_manifest(inspector, *arguments, **named)
    die()
    return changed


MOMENTS = {"before_the_change": change_nothing, "after_the_change": change_and_die}

if __name__ == "__main__":
    if (chosen := os.environ.get("KILL_AT")) is not None:
        DaemonInspector.change_manifest = MOMENTS[chosen]  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

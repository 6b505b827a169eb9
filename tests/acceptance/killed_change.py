"""Runs a program of osrdyne that kills itself at one moment of the first change through its API.

Arguments: the program and its own arguments. `KILL_AT` names the moment, one of `MOMENTS`; without it the program
ends as usual.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

from osrdyne.auth.audit import AuditRecord
from osrdyne.daemon.inspector import DaemonInspector
from osrdyne.pool.routing.manifest_store import ManifestChange
from osrdyne.processors.audit import AuditTrail

write, change_manifest = AuditTrail.write, DaemonInspector.change_manifest


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_first_record() -> None:
    async def write_nothing(trail: AuditTrail, record: AuditRecord) -> bool:
        die()
        return await write(trail, record)

    AuditTrail.write = write_nothing  # type: ignore[method-assign]


def before_the_change() -> None:
    async def change_nothing(inspector: DaemonInspector, *arguments: Any, **named: Any) -> ManifestChange:
        die()
        return await change_manifest(inspector, *arguments, **named)

    DaemonInspector.change_manifest = change_nothing  # type: ignore[method-assign]


def after_the_change() -> None:
    async def change_and_die(inspector: DaemonInspector, *arguments: Any, **named: Any) -> ManifestChange:
        changed = await change_manifest(inspector, *arguments, **named)
        die()
        return changed

    DaemonInspector.change_manifest = change_and_die  # type: ignore[method-assign]


def before_the_answer() -> None:
    async def write_and_die(trail: AuditTrail, record: AuditRecord) -> bool:
        stored = await write(trail, record)
        if record.is_final:
            die()
        return stored

    AuditTrail.write = write_and_die  # type: ignore[method-assign]


ALL = (before_the_first_record, before_the_change, after_the_change, before_the_answer)
MOMENTS: dict[str, Callable[[], None]] = {moment.__name__: moment for moment in ALL}

if __name__ == "__main__":
    if (chosen := os.environ.get("KILL_AT")) is not None:
        MOMENTS[chosen]()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

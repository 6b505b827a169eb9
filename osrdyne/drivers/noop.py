"""The driver that starts nothing: an operator, a debugger or another tool starts the workers.

`osrdyne groups env KEY` prints the environment that such a worker needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar

from osrdyne.drivers.base import Driver, Finding, Instance, InstanceId, WorkerSpec, hash_options
from osrdyne.errors import StartFailedError


class NoopDriver(Driver):
    """Lists and stops no workers. The pool observes them by their reports only."""

    name: ClassVar[str] = "noop"
    manages_workers: ClassVar[bool] = False

    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        return hash_options({"config": self.context.worker_config if config is None else config})

    async def list_instances(self) -> list[Instance]:
        return []

    async def start(self, spec: WorkerSpec) -> Instance:
        raise StartFailedError(
            "The noop driver starts no workers: start one yourself with the environment that "
            "`osrdyne groups env KEY` prints.",
            key=spec.key,
        )

    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        """Do nothing: the operator who starts a worker also stops it."""

    async def remove(self, instance_id: InstanceId) -> None:
        """Do nothing: no instance is ever listed."""

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        return ()

    async def events(self) -> AsyncIterator[None]:
        await asyncio.Event().wait()  # no event ever comes: the reader is cancelled in the end
        yield

    async def check(self) -> list[Finding]:
        message = "Start workers yourself; `osrdyne groups env KEY` prints their environment."
        return [Finding("driver noop", ok=True, message=message)]

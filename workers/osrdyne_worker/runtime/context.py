"""What every part of one worker process shares. Made once by the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from osrdyne.aio.clock import Clock
from osrdyne_worker.runtime.exit import ExitReason
from osrdyne_worker.runtime.settings import RuntimeSettings


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """`spawn` starts a task that the worker owns; `request_exit` makes the worker stop and exit."""

    settings: RuntimeSettings
    clock: Clock
    spawn: Callable[..., asyncio.Task[None]]
    request_exit: Callable[[ExitReason], None]

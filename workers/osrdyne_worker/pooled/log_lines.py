"""The last log lines of each worker in the process. Callers receive them if the worker fails to start."""

from __future__ import annotations

from collections import deque
from typing import Any

import structlog

from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import MAX_LOG_LINES

_FIELD = "worker_id"


class LogLines:
    """Collects log lines by worker: each line belongs to the worker whose task or thread logs it. Thread-safe."""

    def __init__(self) -> None:
        self._lines: dict[WorkerId, deque[str]] = {}

    def install(self) -> None:
        """Receive every formatted log line from now on."""
        structlog.configure(processors=[*structlog.get_config()["processors"], self])

    def __call__(self, _: Any, __: str, line: Any) -> Any:
        lines = self._lines.get(structlog.contextvars.get_contextvars().get(_FIELD, ""))
        if lines is not None:
            lines.append(str(line))
        return line

    def begin(self, worker_id: WorkerId) -> None:
        """Collect the lines of another worker."""
        self._lines[worker_id] = deque(maxlen=MAX_LOG_LINES)

    def end(self, worker_id: WorkerId) -> tuple[str, ...]:
        """Return the last lines of the worker, oldest first, and stop collecting them."""
        return tuple(self._lines.pop(worker_id, ()))


def bind_worker(worker_id: WorkerId, key: str) -> None:
    """Mark all lines that this task or thread, and tasks that it starts, log from now on."""
    structlog.contextvars.bind_contextvars(**{_FIELD: worker_id, "key": key})

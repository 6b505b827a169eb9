"""The settings of the runtime: the `runtime` part of `WORKER_CONFIG`, read once at start; and `RuntimeContext`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from osrdyne.aio.clock import Clock
from osrdyne.errors import ConfigurationError
from osrdyne_worker.runtime.exit import ExitReason

MAX_CONCURRENCY = 64
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Times are in seconds. The defaults are those of the controller's `worker` settings.

    The worker exits when a cancelled handler runs on for `stuck_grace`, when a coroutine blocks the event loop for
    `blocked_timeout`, or when Spark tasks of completed requests run on for `stray_timeout`. Up to `max_abandoned`
    cancelled handlers may run on beside the `concurrency`.
    """

    concurrency: int = 1
    processing_timeout: float = 1800.0
    queue_missing_timeout: float = 60.0
    no_broker_timeout: float = 600.0
    stop_grace: float = 30.0
    stuck_grace: float = 10.0
    max_abandoned: int = 4
    blocked_timeout: float = 30.0
    stray_timeout: float = 30.0
    max_clock_skew: float = 0.0
    skip_abandoned: bool = False
    debug: bool = False
    reply_to_prefixes: tuple[str, ...] | None = None
    statuses: Literal["full", "reference"] = "full"
    log_level: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """What all parts of one worker share. `spawn` starts a task that the worker owns, and none once the worker has been
    cancelled; `request_exit` makes the worker shut down and exit."""

    settings: RuntimeSettings
    clock: Clock
    spawn: Callable[..., asyncio.Future[None]]
    request_exit: Callable[[ExitReason], None]


def runtime_settings(config: Mapping[str, object]) -> RuntimeSettings:
    """Read the settings from a `WORKER_CONFIG` document. Unknown names are ignored: a newer controller may send them.

    Raises `ConfigurationError` that names the setting.
    """
    given = config.get("runtime", {})
    if not isinstance(given, Mapping):
        raise ConfigurationError("WORKER_CONFIG.runtime must be a JSON object.")
    values: dict[str, Any] = {
        one.name: _checked(one.name, given[one.name]) for one in fields(RuntimeSettings) if one.name in given
    }
    return RuntimeSettings(**values)


def _checked(name: str, value: object) -> object:
    if name == "reply_to_prefixes":
        if value is None or (isinstance(value, list) and all(isinstance(prefix, str) for prefix in value)):
            return None if value is None else tuple(value)
        raise ConfigurationError(f"WORKER_CONFIG.runtime.{name} must be a list of names or null, not {value!r}.")
    if name == "log_level":
        valid = isinstance(value, dict) and all(level in LOG_LEVELS for level in value.values())
        expected = f"an object of logger names and levels ({', '.join(LOG_LEVELS)})"
    elif name == "statuses":
        valid, expected = value in ("full", "reference"), "full or reference"
    elif name in {"skip_abandoned", "debug"}:
        valid, expected = isinstance(value, bool), "true or false"
    elif name == "concurrency":
        valid = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_CONCURRENCY
        expected = f"a whole number from 1 to {MAX_CONCURRENCY}"
    elif name == "max_abandoned":
        valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_CONCURRENCY
        expected = f"a whole number from 0 to {MAX_CONCURRENCY}"
    else:
        valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        expected = "a number of seconds"
    if not valid:
        raise ConfigurationError(f"WORKER_CONFIG.runtime.{name} must be {expected}, not {value!r}.")
    return value

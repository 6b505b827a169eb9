"""The runtime's own settings: the `runtime` part of `WORKER_CONFIG`, as plain values. Read once at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from osrdyne.errors import ConfigurationError

MAX_CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Times in seconds. Every field has the default of the controller's `worker` settings.

    `stuck_grace` is how long a handler may go on after it was cancelled, `blocked_timeout` how long a coroutine may
    keep the event loop, and `stray_timeout` how long tasks of requests that are over may run, before the worker ends.
    `max_abandoned` is how many cancelled handlers may go on at once without a place among the `concurrency`.
    """

    concurrency: int = 1
    processing_timeout: float = 1800.0
    queue_missing_timeout: float = 60.0
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


def runtime_settings(config: Mapping[str, object]) -> RuntimeSettings:
    """Read them from a `WORKER_CONFIG` document; what it does not say has the default, unknown names are left alone.

    Raises `ConfigurationError` naming the setting.
    """
    told = config.get("runtime", {})
    if not isinstance(told, Mapping):
        raise ConfigurationError("WORKER_CONFIG.runtime must be a JSON object.")
    values: dict[str, Any] = {
        field.name: _checked(field.name, told[field.name]) for field in fields(RuntimeSettings) if field.name in told
    }
    return RuntimeSettings(**values)


def _checked(name: str, value: object) -> object:
    if name == "reply_to_prefixes":
        if value is None or (isinstance(value, list) and all(isinstance(prefix, str) for prefix in value)):
            return None if value is None else tuple(value)
        raise ConfigurationError(f"WORKER_CONFIG.runtime.{name} must be a list of names or null, not {value!r}.")
    if name == "statuses":
        fits, wanted = value in ("full", "reference"), "full or reference"
    elif name in {"skip_abandoned", "debug"}:
        fits, wanted = isinstance(value, bool), "true or false"
    elif name == "concurrency":
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_CONCURRENCY
        wanted = f"a whole number from 1 to {MAX_CONCURRENCY}"
    elif name == "max_abandoned":
        fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_CONCURRENCY
        wanted = f"a whole number from 0 to {MAX_CONCURRENCY}"
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        wanted = "a number of seconds"
    if not fits:
        raise ConfigurationError(f"WORKER_CONFIG.runtime.{name} must be {wanted}, not {value!r}.")
    return value

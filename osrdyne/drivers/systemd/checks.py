"""Checks a template unit for `osrdyne doctor`, by the properties that systemctl shows. Pure. Used by the driver."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from osrdyne.drivers.base import Finding

PROPERTIES = ("LoadState", "EnvironmentFiles", "StandardInput", "Restart", "TimeoutStopUSec")

_SUBJECT = "worker unit"
_SECONDS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "month": 2629800.0,
    "y": 31557600.0,
}  # fmt: skip
_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|h|d|w|month|y)")


def judge_unit(unit: Mapping[str, str], *, template: str, directory: Path, stop_grace: float | None) -> Finding:
    """Report the first error of the unit, or that it is fine. `directory`: that of the environment files."""
    if unit["LoadState"] != "loaded":
        remedy = "Install it from deploy/systemd and run `systemctl daemon-reload`."
        return Finding(_SUBJECT, ok=False, message=f"{template} is {unit['LoadState']}.", remedy=remedy)
    if not unit.get("EnvironmentFiles", "").startswith(f"{directory}/"):
        remedy = f"Set EnvironmentFile={directory}/%i.env in it."
        return Finding(_SUBJECT, ok=False, message=f"{template} reads no file of {directory}.", remedy=remedy)
    if unit.get("StandardInput") != "file":
        remedy = f"Set StandardInput=file:{directory}/%i.uri in it."
        message = f"{template} does not give the worker the URI of the broker on its standard input."
        return Finding(_SUBJECT, ok=False, message=message, remedy=remedy)
    if unit["Restart"] != "no":
        remedy = "Set Restart=no in it: osrdyne restarts workers itself, with back-off."
        return Finding(_SUBJECT, ok=False, message=f"{template} restarts by itself.", remedy=remedy)
    limit = seconds(unit.get("TimeoutStopUSec", ""))
    if limit is not None and stop_grace is not None and limit < stop_grace:
        message = f"{template} kills a worker after {limit:g} s; worker.stop_grace is {stop_grace:g} s."
        remedy = f"Set TimeoutStopSec={math.ceil(stop_grace)} or more in it (systemctl edit {template})."
        return Finding(_SUBJECT, ok=False, message=message, remedy=remedy, fatal=False)
    return Finding(_SUBJECT, ok=True, message=f"Workers are instances of {template}.")


def seconds(text: str) -> float | None:
    """Parse a time span as systemctl shows it (`1min 30s`, `infinity`); None if malformed. Source: systemd.time(7)."""
    if text == "infinity":
        return math.inf
    parts = [_PART.fullmatch(word) for word in text.split()]
    if not parts or None in parts:
        return None
    return sum(float(part[1]) * _SECONDS[part[2]] for part in parts if part is not None)

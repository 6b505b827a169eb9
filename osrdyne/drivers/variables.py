"""The option `environment` that every driver has: further variables of the workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

RESERVED_PREFIXES = ("WORKER_", "OSRDYNE_")


def _usable(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"{name} is set by osrdyne itself (names in WORKER_* and OSRDYNE_*)")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be passed to a program")
    return variables


Variables = Annotated[dict[str, str], AfterValidator(_usable)]
"""Environment variables, without those that are osrdyne's own."""

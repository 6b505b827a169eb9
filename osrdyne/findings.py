"""The results of checks, as `osrdyne doctor` shows them. Made by `broker` and `drivers`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: what was looked at, whether it is fine, and the remedy if not.

    `fatal`: the daemon cannot do its work while it is not fine.
    """

    subject: str
    ok: bool
    message: str
    remedy: str | None = None
    fatal: bool = True

"""The results of checks, which `osrdyne doctor` prints. Returned by `broker` and `drivers`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: the subject, whether it is fine, and the remedy if not.

    `fatal`: the daemon cannot work while it is not fine.
    """

    subject: str
    ok: bool
    message: str
    remedy: str | None = None
    fatal: bool = True

"""A directory that only the daemon's user writes to. The drivers subprocess and systemd keep their records in one."""

from __future__ import annotations

import os
from pathlib import Path

from osrdyne.errors import DriverUnavailableError


def prepare_directory(path: Path, *, remedy: str) -> None:
    """Create the directory; refuse one that another user owns or could write to. Blocks; raises `OSError` as well."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise DriverUnavailableError(f"The directory {path} belongs to, or can be written by, another user. {remedy}")

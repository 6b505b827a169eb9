"""The directories of this user, as the XDG Base Directory Specification names them. Creates nothing."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where files live that can be made again: `osrdyne` below `$XDG_CACHE_HOME`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osrdyne"


def state_directory() -> Path:
    """Where files live that outlast a restart: `osrdyne` below `$XDG_STATE_HOME`, by default below `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "osrdyne"

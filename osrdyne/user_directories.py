"""The directories of this user by the XDG Base Directory Specification. Creates nothing."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """The directory for files that can be created again: `osrdyne` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osrdyne"


def state_directory() -> Path:
    """The directory for files that outlast a restart: `osrdyne` in `$XDG_STATE_HOME`, by default `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "osrdyne"

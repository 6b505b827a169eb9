"""The directories of this user by the XDG Base Directory Specification. Creates nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def home_directory() -> Path:
    """The home of this user: `$HOME`, else as the host knows it. For a user id without a name, a directory below that
    for temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"osrdyne-home-{os.geteuid()}"


def cache_directory() -> Path:
    """The directory for files that can be created again: `osrdyne` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home_directory() / ".cache") / "osrdyne"


def state_directory() -> Path:
    """The directory for files that outlast a restart: `osrdyne` in `$XDG_STATE_HOME`, by default `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or home_directory() / ".local" / "state") / "osrdyne"

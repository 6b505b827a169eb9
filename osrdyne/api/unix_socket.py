"""The Unix socket of the API: its path and listener for the daemon, and its discovery by commands."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError, PortTakenError
from osrdyne.user_directories import state_directory

AUTO, OFF = "auto", "off"
_SYSTEM_DIRECTORY = Path("/run/osrdyne")
_PROBE_TIMEOUT = 2.0


def socket_candidates(settings: Settings) -> list[Path]:
    """The possible paths of the socket of a daemon with these settings, the preferred one first."""
    configured = settings.api.socket
    if configured == OFF:
        return []
    if configured != AUTO:
        return [Path(configured)]
    # With the port, two daemons of one pool on one host have different paths.
    name = f"{settings.pool.id}-{settings.api.port}.sock" if settings.api.port else f"{settings.pool.id}.sock"
    return [directory / name for directory in _directories()]


def _directories() -> Iterator[Path]:
    yield _SYSTEM_DIRECTORY
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "osrdyne"
    with suppress(RuntimeError):  # a user without a home directory
        yield state_directory()


def find_socket(settings: Settings) -> Path | None:
    """The socket of a running daemon with these settings, if this user may connect to it."""
    return next((path for path in socket_candidates(settings) if _answers(path)), None)


class UnixListener:
    """A listening socket with the permissions 0600, and its file."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`, or `PortTakenError` if another process listens."""
        if _answers(path):
            raise PortTakenError(f"Another process listens on {path}: stop it, or set api.socket to another path.")
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise FileExistsError(errno.EEXIST, "a file that is not a socket is there")
                path.unlink()  # a process that was killed left it behind
            self.socket.bind(str(path))
            path.chmod(0o600)  # before `listen`: nothing can connect until then
            self.socket.listen(128)
            self._inode = path.stat().st_ino
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        self.socket.close()
        with suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


def open_listener(settings: Settings) -> UnixListener | None:
    """The listener of the settings; None if they disable it, or no default path can be used.

    Raises `ConfigurationError` or `PortTakenError` if a configured path cannot be used.
    """
    if settings.api.socket in {AUTO, OFF}:
        for path in socket_candidates(settings):
            with suppress(OSError, PortTakenError):
                if path.parent != _SYSTEM_DIRECTORY:  # only the service manager creates this one
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not path.parent.stat().st_mode & stat.S_IWOTH:
                    return UnixListener(path)
        return None
    path = Path(settings.api.socket)
    try:
        return UnixListener(path)
    except OSError as error:
        raise ConfigurationError(f"api.socket: cannot listen on {path}: {error.strerror or error}.") from error


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True

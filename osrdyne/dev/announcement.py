"""The announcement of a running `osrdyne dev`: a configuration file that other commands of the same user find.

It is written when the stack is up and removed when it ends. After a crash it is ignored, because it contains the id of
its process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError
from osrdyne.user_directories import state_directory

_PROCESS = "# process "


def announcement_file() -> Path:
    """The file: below `$XDG_RUNTIME_DIR` if it is set, else below the user's state directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "osrdyne" if runtime else state_directory()) / "dev.yaml"


def find_announcement() -> str | None:
    """The configuration file of a running stack; None if no stack runs."""
    file = announcement_file()
    try:
        first = file.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return None
    import psutil  # imported here because most commands find no announcement

    process = first.removeprefix(_PROCESS)
    return str(file) if process.isdigit() and psutil.pid_exists(int(process)) else None


@contextmanager
def announced(settings: Settings, *, api_port: int, api_socket: Path | None = None) -> Iterator[Path]:
    """Announce a stack while the context is open. The file contains the broker's password, so it is private.

    Raises `ConfigurationError` if it cannot be written."""
    file = announcement_file()
    management = settings.broker.management_uri
    content = {
        "broker": {
            "uri": settings.broker.uri.get_secret_value(),
            "management_uri": management.get_secret_value() if management else None,
            "scoped_credentials": settings.broker.scoped_credentials,
        },
        "pool": {"id": settings.pool.id},
        "api": {
            "host": settings.api.host,
            "port": api_port,
            "socket": "off" if api_socket is None else str(api_socket),
        },
    }
    text = f"{_PROCESS}{os.getpid()}\n{yaml.safe_dump(content)}"
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(unfinished, flags, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
        unfinished.rename(file)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)  # it contains the password
        variable = "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "XDG_STATE_HOME"
        raise ConfigurationError(
            f"Cannot write {file}, with which other commands find osrdyne dev: {error.strerror}. "
            f"Set {variable} to a directory in which you may write."
        ) from error
    try:
        yield file
    finally:
        if find_announcement() is not None and file.read_text(encoding="utf-8") == text:
            file.unlink()

"""The log files of workers: one for each slot, opened for appending, rotated by copying and truncating.

The worker has the file open itself, not a pipe, so that it continues to write when the controller has ended. The leader
rotates; lines written between copy and truncation are lost. Used by the subprocess driver only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from osrdyne.logs import mask_uri

_TAIL_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The logs of one pool: `NAME.log` is the current one of a slot, `NAME.log.1` the one before, and so on."""

    directory: Path
    max_bytes: int
    old_files: int
    retention: float

    def path(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def open_new(self, name: str) -> int:
        """Rename the log of the slot's former worker and open a new one; returns the file descriptor."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path(name)
        if path.exists() and path.stat().st_size > 0:
            self._shift(path)
            if self.old_files > 0:
                path.rename(_old(path, 1))
            else:
                path.unlink()
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def rotate(self, name: str) -> None:
        """Rotate the log of a running worker if it is larger than `max_bytes`."""
        path = self.path(name)
        if not path.exists() or path.stat().st_size <= self.max_bytes:
            return
        if self.old_files > 0:
            copy = path.with_name(f"{path.name}.new")
            copy.touch(mode=0o600)
            try:
                shutil.copyfile(path, copy)
            except OSError:
                # A full disk, for example. The old logs are only shifted after a complete copy.
                copy.unlink(missing_ok=True)
                raise
            self._shift(path)
            copy.rename(_old(path, 1))
        os.truncate(path, 0)

    def tail(self, name: str, *, lines: int, since: float) -> tuple[str, ...]:
        """The last lines of a worker that was started at `since`, with passwords in URIs masked."""
        path = self.path(name)
        found = _last_lines(path, lines)
        before = _old(path, 1)
        if len(found) < lines and before.exists() and before.stat().st_mtime > since:
            found = _last_lines(before, lines - len(found)) + found
        return tuple(mask_uri(line) for line in found)

    def purge(self, *, keep: Collection[str], now: float) -> None:
        """Delete the logs that were last written longer ago than the retention, except those of the slots in `keep`."""
        if not self.directory.exists():
            return
        for path in self.directory.iterdir():
            name, is_log, _ = path.name.partition(".log")
            if is_log and name not in keep and path.stat().st_mtime < now - self.retention:
                path.unlink(missing_ok=True)

    def _shift(self, path: Path) -> None:
        for number in range(self.old_files - 1, 0, -1):
            if _old(path, number).exists():
                _old(path, number).replace(_old(path, number + 1))


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _last_lines(path: Path, lines: int) -> list[str]:
    """The last lines of a log, from its last 256 KiB; none if the file does not exist. Raises `OSError`."""
    if lines <= 0:
        return []
    with suppress(FileNotFoundError), path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        found = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
        # A line that is cut may begin within a URI, and the password in it would not be recognised.
        return found[1 if start else 0 :][-lines:]
    return []

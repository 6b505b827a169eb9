"""Last values in an SQLite file in WAL mode: readers and the writer do not wait for each other."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from osrdyne.errors import LastValueStoreError
from osrdyne.telemetry.last_values.store import LastValueStore
from osrdyne.user_directories import state_directory

BUSY_TIMEOUT = 5.0
_LOCKED = frozenset({"SQLITE_BUSY", "SQLITE_LOCKED"})
_DAMAGED = frozenset({"SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"})


def default_file(pool: str) -> Path:
    """The file of last values if none is configured. Raises RuntimeError for a user without a home directory."""
    return state_directory() / f"{pool}-last-values.db"


class SqliteStore(LastValueStore):
    """The store in a file that only its user can read."""

    def __init__(self, file: Path, *, pool: str, create: bool = False) -> None:
        super().__init__(pool=pool, create=create)
        self._file = file.absolute()
        self._inode: int | None = None

    def _connect(self) -> sqlite3.Connection:
        if self._creates:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite's other files get the same mode
        # Without creating it: a file that was removed meanwhile would be created with other permissions.
        uri = f"{self._file.as_uri()}?mode=rw"
        self._inode = self._file.stat().st_ino
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
        try:
            if self._creates:
                connection.execute("PRAGMA journal_mode = WAL")
                # After a power failure, the last transactions may be missing as a whole: their messages are read again.
                connection.execute("PRAGMA synchronous = NORMAL")
                for statement in self._tables:
                    connection.execute(f"{statement} WITHOUT ROWID")
            else:
                connection.execute("PRAGMA query_only = 1")
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin(self, cursor: sqlite3.Cursor, *, writes: bool) -> None:
        if self._file.stat().st_ino != self._inode:
            raise LastValueStoreError(f"The file {self._file} was replaced; it is opened again.")
        # A transaction that begins to write later fails without waiting if another one has written meanwhile.
        cursor.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    def _translated(self, error: Exception) -> LastValueStoreError | None:
        if isinstance(error, FileNotFoundError) and not self._creates:
            return LastValueStoreError(
                f"There are no last values in {self._file}: start `osrdyne last-value` on this host, with the same "
                "configuration and user."
            )
        if isinstance(error, OSError):
            return LastValueStoreError(
                f"Cannot use the file of last values {self._file}: {error.strerror}. Set telemetry.last_values.file to "
                "a path that this user can write to."
            )
        if not isinstance(error, sqlite3.Error):
            return None
        name: str = getattr(error, "sqlite_errorname", "")
        code = "_".join(name.split("_")[:2])
        if code in _LOCKED:
            remedy = f"another program has locked it for more than {BUSY_TIMEOUT:g} s. End that program"
        elif code == "SQLITE_FULL":
            remedy = "the disk is full. Free some space"
        elif code in _DAMAGED:
            remedy = f"it is not usable ({error}). Move it away: the reader then reads the whole log again"
        else:
            remedy = f"{error}. Check its directory, permissions and disk"
        return LastValueStoreError(f"Cannot use the file of last values {self._file}: {remedy}.")

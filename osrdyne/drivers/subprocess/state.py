"""The state directory of one pool: which slots are taken, and by which process.

A slot is taken while its lock is held or its record exists. The worker inherits the lock, so that the slot stays taken
as long as the worker runs, even if the controller ends (lifecycle: unique-instance-names). Used by the subprocess
driver only.

    records/NAME.json   the worker in the slot, until the pool removes it
    locks/NAME          an empty file with an flock
    secrets/NAME        the worker's AMQP URI, mode 0600
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from osrdyne.drivers.base import Exit
from osrdyne.drivers.shared import prepare_directory
from osrdyne.errors import DriverUnavailableError
from osrdyne.protocol.names import Key, WorkerId, fit_key

_KEY_LIMIT = 100
_REMEDY = "Remove it, or name another one in driver.options.state_directory."


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one worker. Without `pid` its start is not completed, or was interrupted."""

    key: Key
    slot: int
    worker_id: WorkerId
    spec_hash: str
    generation: str
    started_at: float
    boot_id: str
    pid: int | None = None
    ticks: int | None = None
    stopping: bool = False
    exit: Exit | None = None


_RECORD = TypeAdapter(Record)


def slot_name(key: Key, slot: int) -> str:
    """The file name of a slot: the key in a readable encoding, and the number of the slot."""
    return f"{fit_key(key, _KEY_LIMIT)}.{slot}"


class StateDirectory:
    """The files of one pool. Every method blocks, and raises `DriverUnavailableError` if a file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = path / "records"
        self._locks = path / "locks"
        self._secrets = path / "secrets"
        self._read: dict[str, tuple[tuple[int, int], Record | None]] = {}

    def prepare(self) -> None:
        """Create missing directories; refuse one that another user could write to."""
        with self._translated():
            prepare_directory(self.path, remedy=_REMEDY)
            for path in (self._records, self._locks, self._secrets):
                path.mkdir(mode=0o700, exist_ok=True)

    def records(self) -> dict[str, Record | None]:
        """Every record by slot name; None if malformed. Only changed records are read again."""
        with self._translated(), os.scandir(self._records) as entries:
            stamps = {
                entry.name.removesuffix(".json"): (entry.inode(), entry.stat().st_mtime_ns)
                for entry in entries
                if entry.name.endswith(".json")
            }
        for name in self._read.keys() - stamps.keys():
            del self._read[name]
        for name, stamp in stamps.items():
            if name not in self._read or self._read[name][0] != stamp:
                self._read[name] = (stamp, self._load(name))
        return {name: record for name, (_, record) in self._read.items()}

    def has_record(self, name: str) -> bool:
        with self._translated():
            return self._record_path(name).exists()

    def write(self, name: str, record: Record) -> None:
        """Write or replace a record atomically."""
        with self._translated():
            _write_private(self._record_path(name), _RECORD.dump_json(record))

    def write_secret(self, name: str, text: str) -> Path:
        """Write a secret that only this user can read; returns its file."""
        with self._translated():
            path = self._secrets / name
            _write_private(path, text.encode())
            return path

    def forget_secret(self, name: str) -> None:
        with self._translated():
            (self._secrets / name).unlink(missing_ok=True)

    def lock(self, name: str) -> int | None:
        """Take the slot's lock and return its file descriptor; None while another process holds it."""
        with self._translated():
            while True:
                fd = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    # The kernel releases the lock when its last holder ends, so that a crash needs no clean-up.
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(fd)
                    return None
                # `forget` deletes the file under its lock: a lock on the deleted file would exclude no other process.
                if _is_same_file(fd, self._locks / name):
                    return fd
                os.close(fd)

    def forget(self, name: str) -> None:
        """Free the slot. The caller holds its lock."""
        with self._translated():
            # The record first: a crash in between leaves a lock file that nothing holds, and so a free slot.
            self._record_path(name).unlink(missing_ok=True)
            self.forget_secret(name)
            (self._locks / name).unlink(missing_ok=True)
        self._read.pop(name, None)

    def _load(self, name: str) -> Record | None:
        with self._translated():
            try:
                return _RECORD.validate_json(self._record_path(name).read_bytes())
            except (FileNotFoundError, ValidationError):  # removed meanwhile, or truncated by a power failure
                return None

    def _record_path(self, name: str) -> Path:
        return self._records / f"{name}.json"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DriverUnavailableError(
                f"The state directory cannot be used: {error.filename or self.path}: {error.strerror}. "
                "Set another directory in driver.options.state_directory."
            ) from error


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    # Atomically: a reader sees the old record or the new one, also after a crash.
    temporary.replace(path)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False

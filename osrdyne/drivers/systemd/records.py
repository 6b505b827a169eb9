"""The environment files of workers under systemd: one for each instance, mode 0600, and the record of the worker too.

The first line, a comment for systemd, is the record; the other lines are variables. Creating the file takes the slot
atomically. Removing it frees the slot, and a start that takes effect later fails, because systemd finds no environment.
Until the worker has started, a second file contains the AMQP URI; systemd opens it as the worker's standard input. Used
by the systemd driver only. Every method blocks, and raises `DriverUnavailableError` if the files cannot be used.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from osrdyne.drivers.shared import prepare_directory
from osrdyne.errors import DriverUnavailableError
from osrdyne.protocol.names import Key, WorkerId

_SUFFIX, _URI_SUFFIX = ".env", ".uri"
_REMEDY = "Remove it, or name another one in driver.options.runtime_directory and in the unit."


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one worker. `started`: systemd has reported that it started the unit."""

    key: Key
    slot: int
    worker_id: WorkerId
    spec_hash: str
    generation: str
    started_at: float
    started: bool = False


_RECORD = TypeAdapter(Record)


class EnvironmentFiles:
    """The environment files of one pool: those whose name begins with `prefix`."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path = path
        self._prefix = prefix

    def prepare(self) -> None:
        """Create the directory; refuse one that another user could write to."""
        with self._translated():
            prepare_directory(self.path, remedy=_REMEDY)

    def records(self) -> dict[str, Record]:
        """Every record by instance name."""
        with self._translated():
            names = [file.name for file in self.path.iterdir()] if self.path.is_dir() else []
        return self.read_all(
            name.removesuffix(_SUFFIX) for name in names if name.startswith(self._prefix) and name.endswith(_SUFFIX)
        )

    def read_all(self, instances: Iterable[str]) -> dict[str, Record]:
        """The records of these instances, as far as they have one."""
        found = {instance: self.read(instance) for instance in instances}
        return {instance: record for instance, record in found.items() if record is not None}

    def read(self, instance: str) -> Record | None:
        """The record of an instance; None if it has no file, or the file contains no record."""
        with self._translated():
            try:
                first = self._file(instance).read_bytes().partition(b"\n")[0]
                return _RECORD.validate_json(first.removeprefix(b"# "))
            except (FileNotFoundError, ValidationError):
                return None

    def create(self, instance: str, record: Record, variables: str, *, uri: str) -> bool:
        """Take the slot by creating the file atomically; False if the slot is taken.

        The file with the URI follows, because only the holder of the slot may write it. If that fails, the start fails,
        and the slot is freed as after any failed start.
        """
        self.prepare()
        with self._translated(), self._written(_content(record, variables.encode())) as temporary:
            try:
                self._file(instance).hardlink_to(temporary)
            except FileExistsError:
                return False
        with self._translated(), self._written(uri.encode()) as temporary:
            temporary.replace(self._uri_file(instance))
        return True

    def mark_started(self, instance: str, record: Record) -> None:
        """Record that systemd has started the unit, unless another worker has the slot by now. Delete the file with the
        URI: the worker has it open."""
        with self._translated():
            if self.read(instance) == record:
                self._uri_file(instance).unlink(missing_ok=True)
                variables = self._file(instance).read_bytes().partition(b"\n")[2]
                with self._written(_content(replace(record, started=True), variables)) as temporary:
                    temporary.replace(self._file(instance))

    def remove(self, instance: str, worker_id: WorkerId) -> None:
        """Free the slot if this worker holds it."""
        record = self.read(instance)
        if record is not None and record.worker_id == worker_id:
            with self._translated():
                self._uri_file(instance).unlink(missing_ok=True)
                self._file(instance).unlink(missing_ok=True)

    def _uri_file(self, instance: str) -> Path:
        return self.path / f"{instance}{_URI_SUFFIX}"

    def _file(self, instance: str) -> Path:
        return self.path / f"{instance}{_SUFFIX}"

    @contextmanager
    def _written(self, content: bytes) -> Iterator[Path]:
        """A temporary file (mode 0600) with this content."""
        fd, name = tempfile.mkstemp(prefix=".new-", dir=self.path)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            yield Path(name)
        finally:
            with suppress(FileNotFoundError):
                Path(name).unlink()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DriverUnavailableError(
                f"The environment files cannot be used: {error.filename or self.path}: {error.strerror}."
            ) from error


def _content(record: Record, variables: bytes) -> bytes:
    return b"# %s\n%s" % (json.dumps(asdict(record)).encode(), variables)

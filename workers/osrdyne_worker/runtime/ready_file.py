"""The ready file: it exists while the worker takes requests. For a platform that polls it, such as a Kubernetes probe.

`main` deletes the file of an earlier run, the worker writes it when it is ready and deletes it when it exits. A file
that cannot be written is logged and costs no request: the platform does not consider the worker ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from osrdyne.logs import get_logger
from osrdyne.protocol.environment import READY_FILE_VARIABLE

log = get_logger("ready_file")


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """The file at `path`; None: no file is configured."""

    path: Path | None

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> ReadyFile:
        name = variables.get(READY_FILE_VARIABLE)
        return cls(Path(name) if name else None)

    def write(self) -> None:
        if self.path is not None:
            try:
                self.path.touch()
            except OSError as error:
                log.error("ready file cannot be written", path=str(self.path), error=error.strerror)

    def delete(self) -> None:
        if self.path is not None:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                log.error("ready file cannot be deleted", path=str(self.path), error=error.strerror)


NO_READY_FILE = ReadyFile(None)

"""The data files that belong to a partition of a table after its commits, and checkpoints of them. Pure.

A checkpoint has the files after one commit, so that a reader reads only later commits. A checkpoint that is damaged, or
was made of other commits than those in the directory, is ignored.
Source: docs/reference/telemetry/storage.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file; `path` is relative to the table. `sorted`: by key, series and time, as compaction writes it."""

    path: str
    rows: int
    bytes: int
    sorted: bool = False


@dataclass(slots=True)
class LiveFiles:
    """The data files of a partition after the commit `number`, by path. `removed`: files that no longer belong to it
    and may still be on disk, with the time when they were removed. `copies`, `purged`: as of the commits, together."""

    number: int = 0
    files: dict[str, DataFile] = field(default_factory=dict)
    invalid_files: dict[str, DataFile] = field(default_factory=dict)
    removed: dict[str, float] = field(default_factory=dict)
    copies: int = 0
    purged: int = 0

    def apply(
        self,
        number: int,
        *,
        files: Sequence[DataFile],
        invalid_files: Sequence[DataFile],
        removed: Sequence[str],
        at: float,
        deleted_before: float,
        copies: int,
        purged: int,
    ) -> None:
        """Apply the next commit."""
        self.copies += copies
        self.purged += purged
        self.number = number
        self.files |= {one.path: one for one in files}
        self.invalid_files |= {one.path: one for one in invalid_files}
        if deleted_before:
            self.removed = {path: when for path, when in self.removed.items() if when >= deleted_before}
        for path in removed:
            self.files.pop(path, None)
            self.invalid_files.pop(path, None)
            self.removed[path] = at


def encode_checkpoint(live: LiveFiles, *, commit: bytes) -> bytes:
    """A checkpoint of the files after a commit. `commit`: its content on disk."""
    document = {
        "format": _FORMAT,
        "number": live.number,
        "commit": hashlib.sha256(commit).hexdigest(),
        "files": [asdict(one) for one in live.files.values()],
        "invalid_files": [asdict(one) for one in live.invalid_files.values()],
        "removed": live.removed,
        "copies": live.copies,
        "purged": live.purged,
    }
    line = json.dumps(document).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def decode_checkpoint(content: bytes, *, number: int, commit: bytes) -> LiveFiles | None:
    """The files in a checkpoint; None if it is damaged, or was made of another commit."""
    line, _, digest = content.partition(b"\n")
    if digest.strip() != hashlib.sha256(line).hexdigest().encode():
        return None
    try:
        document = json.loads(line)
        same = (document["format"], document["number"]) == (_FORMAT, number)
        if not same or document["commit"] != hashlib.sha256(commit).hexdigest():
            return None
        return LiveFiles(
            number,
            _by_path(document["files"]),
            _by_path(document["invalid_files"]),
            dict(document["removed"]),
            int(document["copies"]),
            int(document["purged"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _by_path(several: Sequence[Mapping[str, object]]) -> dict[str, DataFile]:
    files = [DataFile(**one) for one in several]  # type: ignore[arg-type]
    return {one.path: one for one in files}

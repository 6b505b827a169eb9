"""Schemas that Spark has read from Parquet and ORC files, remembered from one worker to the next.

Used when views are opened. A schema is remembered with the names, sizes and times of all files of the table, and used
only while these are the same: Spark would read the same again. Only schemas of local files are remembered, in the cache
directory of the user. A failure costs time and nothing else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from osrdyne.user_directories import cache_directory

FORMATS = frozenset({"parquet", "orc"})
"""CSV and JSON are left out: a schema that is given there also changes how rows are read."""
MAX_FILES = 10_000
MAX_DEPTH = 20
MAX_SCHEMAS = 5_000
_GLOB = frozenset("*?[{")


def schema_directory() -> Path:
    """Beside the archives of classes."""
    return cache_directory() / "schemas"


def remembered_schemas(session: Any) -> RememberedSchemas:
    """Those of the user, for the version and the settings of this session."""
    # Other settings, such as the heap, change no schema. The warehouse is a directory of the worker.
    settings = {
        name: value
        for name, value in session.conf.getAll.items()
        if name.startswith("spark.sql.") and not name.startswith("spark.sql.warehouse.")
    }
    return RememberedSchemas(schema_directory(), spark_version=session.version, settings=settings)


class RememberedSchemas:
    """The schemas in one directory. Never raises for what is in the directory, or for one that cannot be written.

    `settings`: those of Spark that may change a schema. Workers with other settings remember their own.
    """

    def __init__(self, directory: Path, *, spark_version: str, settings: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self._spark_version = spark_version
        self._settings = sorted((settings or {}).items())

    def get(self, path: str, format_name: str, options: Mapping[str, object]) -> dict[str, Any] | None:
        """The schema of a table as Spark's JSON value; None if it is not known or its files have changed."""
        files = signature(path) if format_name in FORMATS else None
        if files is None:
            return None
        with suppress(OSError, ValueError):
            file = self._file(path, format_name, options)
            found = file.stat()
            if found.st_uid not in {0, os.geteuid()} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            document = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(document, dict) and document.get("files") == files:
                schema = document.get("schema")
                return schema if isinstance(schema, dict) else None
        return None

    def put(
        self, path: str, format_name: str, options: Mapping[str, object], schema: Mapping[str, Any], *, files: str
    ) -> None:
        """Remember a schema; `files`: the signature from before it was read."""
        file = self._file(path, format_name, options)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}.{id(schema):x}")
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Seldom: listing so many files takes longer than writing one.
            if random.randrange(max(1, MAX_SCHEMAS // 100)) == 0:
                self._make_room()
            unfinished.write_text(json.dumps({"files": files, "schema": schema}), encoding="utf-8")
            unfinished.chmod(0o600)
            unfinished.replace(file)

    def _make_room(self) -> None:
        """Remove the oldest tenth when there are too many."""
        files = list(self._directory.iterdir())
        if len(files) >= MAX_SCHEMAS:
            for old in sorted(files, key=lambda file: file.stat().st_mtime)[: MAX_SCHEMAS // 10]:
                old.unlink(missing_ok=True)

    def _file(self, path: str, format_name: str, options: Mapping[str, object]) -> Path:
        given = sorted((name, str(value)) for name, value in options.items())
        facts = json.dumps([self._spark_version, self._settings, path, format_name, given])
        return self._directory / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


def signature(path: str) -> str | None:
    """A hash of the names, sizes and times of the files below a local path; None for other paths, and for too many."""
    local = local_path(path)
    if local is None:
        return None
    digest = hashlib.sha256()
    try:
        for count, (name, found) in enumerate(walk_files(local)):
            if count >= MAX_FILES:
                return None
            digest.update(
                f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\n".encode("utf-8", "surrogatepass")
            )
    except OSError:
        return None
    return digest.hexdigest()


def local_path(path: str) -> Path | None:
    """The path of local files; None for other paths and for patterns of names."""
    local = path.removeprefix("file://").removeprefix("file:")
    return Path(local) if local.startswith("/") and not has_wildcards(local) else None


def has_wildcards(path: str) -> bool:
    """Whether Spark takes a path for a pattern of names."""
    return not _GLOB.isdisjoint(path)


def walk_files(path: Path, *, directories: bool = False, depth: int = 0) -> Iterator[tuple[Path, os.stat_result]]:
    """The files below a path, and with `directories` also these, in a fixed order, with their status.

    Raises `OSError`; `FileNotFoundError` only if the path itself does not exist. Spark ignores as well a file that is
    removed while its directory is listed, and a symbolic link without a target.
    """
    if depth > MAX_DEPTH:  # links may lead back
        raise OSError(errno.ELOOP, "too many directories", str(path))
    if not path.is_dir():
        yield path, path.stat()
        return
    if directories:
        yield path, path.stat()
    for below in sorted(path.iterdir()):
        with suppress(FileNotFoundError):
            yield from walk_files(below, directories=directories, depth=depth + 1)

"""Results of queries that are read page by page. The SQL pipeline calls it for `/sql` with `page_size` or `cursor`.

The query runs once. Its result is a file of Arrow record batches in a directory of the worker, and each page is read
from the file: all pages show the same result, whatever happens to the data. A cursor is the random name of the file and
the number of the next row. If the worker dies while it writes, the unfinished file has no cursor, and the redelivered
request runs the query again; if it dies afterwards, a worker that has the directory can serve the next page.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from osrdyne.protocol.data_versions import DATA_VERSION_HEADER
from osrdyne_worker import Answer, RequestError
from osrdyne_worker.app.tables import Rows
from osrdyne_worker.pipelines.views.datasets import PagingConfig
from osrdyne_worker.spark.answers.arrow_batches import arrow_batches, estimated_bytes
from osrdyne_worker.spark.answers.results import PreparedQuery

READ_AGAIN = 60.0
"""Seconds for which the last page can be requested again: its answer may have been lost."""
_CURSOR = re.compile(r"([A-Za-z0-9_-]{22})\.(\d{1,15})")
_SUFFIX = ".arrow"
_UNFINISHED = ".unfinished"
_FACTS = b"osrdyne"


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a result, the number of all its rows, the cursor of the next page (None: there is none), and the version
    of the data from which the result was computed (None: unknown)."""

    rows: Rows
    total_rows: int
    cursor: str | None
    data_version: int | None = None

    def answer(self, *, accept: str | None) -> Answer:
        facts = {"total_rows": self.total_rows, "cursor": self.cursor}
        headers: dict[str, object] = {"x-total-rows": str(self.total_rows), DATA_VERSION_HEADER: self.data_version}
        if self.cursor:
            headers["x-cursor"] = self.cursor
        return replace(self.rows, facts=facts).answer(Answer(headers=headers), accept=accept)


class StoredResults:
    """The stored results of one key. Thread-safe; several workers may use one directory.

    The time of a file's last use is its modification time.
    """

    def __init__(self, config: PagingConfig, *, pool: str, key: str, now: Callable[[], float] = time.time) -> None:
        self._config = config
        self._now = now
        # A cursor of another key finds no file, although its random part is right.
        self._prefix = hashlib.sha256(f"{pool}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def first_page(
        self,
        query: PreparedQuery,
        *,
        size: int,
        limit: int | None,
        data_version: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Page:
        """Run a query for at most `limit` rows and store its result; its first rows.

        `data_version`: of the data that the query reads; stored with the result. `check` is called repeatedly, and
        may raise. Raises `RequestError` (413, 503) for a result that is too large, and Spark's error.
        """
        estimate = estimated_bytes(query.frame) if limit is None else None
        if estimate is not None and estimate > self._config.max_bytes:
            raise too_large(f"would have about {estimate:,} bytes; the limit is {self._config.max_bytes:,}")
        directory = self._directory()
        self._make_room(directory)
        token = secrets.token_urlsafe(16)
        final = self._file(directory, token)
        unfinished = final.with_suffix(_UNFINISHED)
        # One row more than the limit shows that there are more.
        frame = query.frame if limit is None else query.frame.limit(limit + 1)
        facts = {"types": query.types, "limit": limit, "data_version": data_version}
        with _storage_errors(directory), _locked(unfinished):
            largest = self._config.max_bytes
            self._write(unfinished, frame, facts, max_bytes=largest, too_large=too_large, check=check)
            # Complete before it has its name: no cursor can lead to a part of a result.
            unfinished.replace(final)
        page = self._read(final, token, offset=0, size=size)
        if page.cursor is None:
            final.unlink(missing_ok=True)
        return page

    @contextmanager
    def spilled(
        self,
        query: PreparedQuery,
        *,
        limit: int | None,
        max_bytes: int,
        too_large: Callable[[str], RequestError],
        check: Callable[[], None],
    ) -> Iterator[tuple[Path, int]]:
        """The result of a query as an Arrow file without a cursor, and the number of its rows.

        The file is removed at the end; if the worker dies, as an expired result. Raises as `first_page` does, and
        `too_large` above `max_bytes`.
        """
        directory = self._directory()
        self._make_room(directory)
        path = self._file(directory, secrets.token_urlsafe(16)).with_suffix(_UNFINISHED)
        frame = query.frame if limit is None else query.frame.limit(limit)
        with ExitStack() as locked:
            with _storage_errors(directory):
                locked.enter_context(_locked(path))
                rows = self._write(path, frame, None, max_bytes=max_bytes, too_large=too_large, check=check)
            yield path, rows

    def page(self, cursor: str, *, size: int, required_version: int | None = None) -> Page:
        """The rows from a cursor on. Raises `RequestError`: 400 for an invalid cursor, 410 for an expired one or for
        data older than `required_version`."""
        found = _CURSOR.fullmatch(cursor)
        if found is None:
            raise RequestError("cursor is not one that /sql has answered; send it unchanged.", 400, "invalid_cursor")
        token, offset = found[1], int(found[2])
        file = self._file(self._directory(), token)
        try:
            if self._is_expired(file.stat()):
                raise FileNotFoundError
            page = self._read(file, token, offset=offset, size=size)
        except FileNotFoundError:
            raise RequestError(
                f"The result of this cursor is no longer there: it was not read for {self._config.expiry:g} s, or its "
                "worker has ended. Send the query again with page_size.",
                410,
                "cursor_expired",
            ) from None
        if required_version is not None and (page.data_version is None or page.data_version < required_version):
            found_version = "an unknown version" if page.data_version is None else f"version {page.data_version}"
            raise RequestError(
                f"The result of this cursor is of {found_version} of the data, and the request needs version "
                f"{required_version}. Send the query again with page_size.",
                410,
                "cursor_expired",
            )
        return page

    def _write(
        self,
        path: Path,
        frame: Any,
        facts: object,
        *,
        max_bytes: int,
        too_large: Callable[[str], RequestError],
        check: Callable[[], None],
    ) -> int:
        """Write the record batches, with the facts in the metadata of the schema; the number of rows."""
        schema, batches = arrow_batches(frame)
        if facts is not None:
            schema = schema.with_metadata({_FACTS: json.dumps(facts)})
        rows = 0
        with (
            closing(batches),
            path.open("wb") as file,
            pa.ipc.new_file(file, schema) as writer,
        ):
            for batch in batches:
                check()
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
                rows += batch.num_rows
                if file.tell() > max_bytes:
                    raise too_large(f"has more than {max_bytes:,} bytes")
        return rows

    def _read(self, path: Path, token: str, *, offset: int, size: int) -> Page:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            facts = json.loads(reader.schema.metadata[_FACTS])
            found: list[pa.RecordBatch] = []
            total = 0
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)  # refers to the file: only the rows of the page are copied
                start, end = max(offset - total, 0), min(offset + size - total, batch.num_rows)
                if start < end:
                    found.append(batch.slice(start, end - start))
                total += batch.num_rows
            limit = facts["limit"]
            truncated = limit is not None and total > limit
            total = limit if truncated else total
            table = pa.Table.from_batches(found, reader.schema).slice(0, max(0, total - offset))
        end = offset + table.num_rows
        last = end >= total
        now = self._now()
        with suppress(OSError):
            os.utime(path, times=(now, now - max(0.0, self._config.expiry - READ_AGAIN) if last else now))
        types = tuple((str(name), str(kind)) for name, kind in facts["types"])
        rows = Rows(table.replace_schema_metadata(None), types, truncated=truncated and last)
        return Page(rows, total, None if last else f"{token}.{end}", facts.get("data_version"))

    def _directory(self) -> Path:
        """The directory, which no other user can read or write. Raises `RequestError` (500)."""
        configured = self._config.directory
        path = Path(configured) if configured else Path(tempfile.gettempdir()) / f"osrdyne-pages-{os.geteuid()}"
        with _storage_errors(path):
            path.mkdir(mode=0o700, parents=configured is not None, exist_ok=True)
            found = path.lstat()
        # Anyone may create this name in a shared temporary directory, also as a link.
        foreign = not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077
        if configured is None and foreign:
            raise RequestError(
                f"{path} is not a directory of this user alone; remove it, or set worker.config.paging.directory.",
                500,
                "paging_unavailable",
            )
        return path

    def _file(self, directory: Path, token: str) -> Path:
        return directory / f"{self._prefix}-{token}{_SUFFIX}"

    def _make_room(self, directory: Path) -> None:
        """Remove expired results. Raises `RequestError` (503) if there is no room for another one."""
        used = 0
        with _storage_errors(directory):
            files = list(directory.iterdir())
        for file in files:
            if file.suffix in (_SUFFIX, _UNFINISHED):
                # Another worker may remove it at the same time.
                with suppress(FileNotFoundError):
                    found = file.stat()
                    # However slow its query is: a result that is being written does not expire.
                    if self._is_expired(found) and not _is_locked(file):
                        file.unlink()
                    else:
                        used += found.st_size
        if used >= self._config.max_total_bytes:
            raise RequestError(
                f"The results that wait to be read have {used:,} bytes; the limit is {self._config.max_total_bytes:,} "
                f"(paging.max_total_bytes). Read or drop them: a result is removed after {self._config.expiry:g} s.",
                503,
                "paging_full",
            )

    def _is_expired(self, found: os.stat_result) -> bool:
        return found.st_mtime + self._config.expiry < self._now()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Create a file for this user alone, with a lock that ends with this process at the latest. Remove it at the end,
    unless it was moved."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Whether a worker is writing this file."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # removed meanwhile, or a file system without locks
        return False
    return False


def too_large(what: str) -> RequestError:
    return RequestError(
        f"The result {what} (paging.max_bytes). Ask for fewer rows or columns, or use /export.", 413, "answer_too_large"
    )


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    """Translate errors of the file system."""
    try:
        yield
    except OSError as error:
        raise RequestError(
            f"No result can be stored in {directory}: {error.strerror or error}. Free space there, or set "
            "worker.config.paging.directory.",
            500,
            "paging_unavailable",
        ) from error

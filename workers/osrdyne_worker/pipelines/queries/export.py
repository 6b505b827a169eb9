"""Results of queries as files in the directory of the pool. The SQL pipeline calls it for `/export`.

The files of an export are written into a directory of this attempt, `<directory>/<key>/<name>/data-<attempt>`. Then
`<name>/_manifest.json` is created, which lists them: an export without a manifest is not finished. The name of an
export depends on its request, so a redelivered request finds the manifest of its first attempt.

- The worker dies before it creates the manifest: RabbitMQ redelivers the request, and the next attempt writes its own
  directory, creates the manifest, and removes the directories of other attempts.
- It dies after that, before the reply: the next attempt answers with the manifest, and runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pyspark.sql import Observation
from pyspark.sql import functions as F

from osrdyne.logs import get_logger
from osrdyne.protocol.data_versions import required_data_version
from osrdyne_worker import Call, RequestError
from osrdyne_worker.pipelines.queries.paging import StoredResults
from osrdyne_worker.pipelines.views.datasets import ExportConfig
from osrdyne_worker.spark.answers.arrow_batches import estimated_bytes
from osrdyne_worker.spark.answers.results import PreparedQuery
from osrdyne_worker.spark.files.hadoop_files import HadoopFiles
from osrdyne_worker.spark.jobs import GROUP

log = get_logger(__name__)

MANIFEST = "_manifest.json"
SIZE_INTERVAL = 1.0
"""Seconds between two counts of the bytes that Spark has written."""
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "parquet": {},
    "csv": {
        "header": True,
        # Values are exact: by default Spark trims text, cuts timestamps to milliseconds and escapes with backslashes.
        "ignoreLeadingWhiteSpace": False,
        "ignoreTrailingWhiteSpace": False,
        "escape": '"',
        "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
        "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    },
}
"""Options of Spark's writers."""


class ExportRequest(BaseModel):
    """Body of `/export`. `id`: two requests of a key with the same body, and this id, export once."""

    model_config = ConfigDict(extra="forbid")

    query: str
    parameters: dict[str, Any] | list[Any] | None = None
    format: Literal["parquet", "csv", "arrow"] = "parquet"
    limit: int | None = Field(None, ge=0)
    id: str | None = Field(None, min_length=1, max_length=200)


@dataclass(frozen=True, slots=True)
class Exports:
    """The exports of one key."""

    config: ExportConfig
    results: StoredResults
    pool: str
    key: str

    def run(self, session: Any, query: PreparedQuery, call: Call, request: ExportRequest) -> dict[str, Any]:
        """Export the result of a query, or find the export of an earlier attempt; its manifest.

        Raises `RequestError`, and Spark's error.
        """
        if not hasattr(session, "_jsparkSession"):
            raise RequestError("Spark Connect cannot export; use another master.", 400, "export_not_supported")
        files = HadoopFiles(session, self.directory())
        name = f"{_digest(self.pool, self.key)[:16]}/{_export_name(call, request)}"
        if (manifest := self._manifest(files, name)) is not None:
            return {**manifest, "repeated": True}
        estimate = estimated_bytes(query.frame) if request.limit is None else None
        if estimate is not None and estimate > self.config.max_bytes:
            raise self._too_large(f"would have about {estimate:,} bytes")
        # Its own directory: another attempt, whose worker lost its connection, may still write.
        attempt = f"{name}/data-{secrets.token_hex(8)}"
        try:
            rows = self._write(session, files, attempt, query, request, check=call.raise_if_cancelled)
            written = files.listed(attempt)
            size = sum(length for _, length in written)
            if size > self.config.max_bytes:
                raise self._too_large(f"has {size:,} bytes")
            manifest = {
                "format": request.format,
                "paths": [path for path, _ in written],
                "rows": rows,
                "bytes": size,
                "columns": [{"name": name, "type": kind} for name, kind in query.types],
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "key": self.key,
                "data_version": call.context.data_version,
            }
            # After all files: an export that has a manifest is complete.
            text = json.dumps(manifest, ensure_ascii=False).encode("utf-8", "replace")
            created = files.create(f"{name}/{MANIFEST}", text, aside=f"{attempt}/{MANIFEST}")
            # Over NFS the manifest that exists may be ours: the kernel repeats a call whose answer was lost.
            created = created or self._is_listed(files, name, attempt)
        except BaseException:
            with suppress(Exception):  # Spark may be gone; the next attempt removes the directory
                if not self._is_listed(files, name, attempt):
                    files.delete(attempt)
            raise
        if not created:
            # Another attempt has created the manifest first: its files are the export.
            files.delete(attempt)
            manifest = self._manifest(files, name) or manifest
            return {**manifest, "repeated": True}
        for other in files.directories(name):
            if other.startswith("data-") and not attempt.endswith(f"/{other}"):
                files.delete(f"{name}/{other}")
        log.info("result exported", rows=rows, bytes=size, files=len(written), format=request.format)
        return {**manifest, "repeated": False}

    def directory(self) -> str:
        """The directory of all exports. Raises `RequestError` (400) if there is none."""
        if self.config.directory is None:
            raise RequestError(
                "This pool has no directory for exports; set worker.config.export.directory.",
                400,
                "export_not_configured",
            )
        return self.config.directory.rstrip("/")

    def _manifest(self, files: HadoopFiles, name: str) -> dict[str, Any] | None:
        text = files.read(f"{name}/{MANIFEST}")
        if text is None:
            return None
        manifest: dict[str, Any] = json.loads(text)
        return manifest

    def _is_listed(self, files: HadoopFiles, name: str, attempt: str) -> bool:
        """Whether the manifest lists the files of this attempt: a call that failed may have created it."""
        manifest = self._manifest(files, name)
        return manifest is not None and any(f"/{attempt}/" in path for path in manifest["paths"])

    def _write(
        self,
        session: Any,
        files: HadoopFiles,
        directory: str,
        query: PreparedQuery,
        request: ExportRequest,
        *,
        check: Callable[[], None],
    ) -> int:
        """Write the files; the number of rows."""
        if request.format == "arrow":
            with self.results.spilled(
                query, limit=request.limit, max_bytes=self.config.max_bytes, too_large=self._too_large, check=check
            ) as (path, rows):
                files.upload(path, f"{directory}/part-00000.arrow")
            return rows
        frame = query.frame if request.limit is None else query.frame.limit(request.limit)
        counted = Observation()
        frame = frame.observe(counted, F.count(F.lit(1)).alias("rows"))
        with SizeLimit(session, files, directory, max_bytes=self.config.max_bytes) as limit:
            try:
                frame.write.format(request.format).options(**_OPTIONS[request.format]).save(files.path(directory))
            except Exception:
                if limit.exceeded_by is None:
                    raise
                # The job was cancelled because of that.
                raise self._too_large(f"has {limit.exceeded_by:,} bytes, and is not complete") from None
        check()
        return int(counted.get["rows"])

    def _too_large(self, what: str) -> RequestError:
        return RequestError(
            f"The export {what}; the limit is {self.config.max_bytes:,} (export.max_bytes). Export fewer rows or "
            "columns, or in several parts.",
            413,
            "export_too_large",
        )


class SizeLimit:
    """Watches the files of a directory while Spark writes them, and cancels the jobs of this thread once they have more
    than `max_bytes` together. A context manager.

    Some object stores show a file only when its task has ended, or all files when the job has.
    """

    def __init__(self, session: Any, files: HadoopFiles, directory: str, *, max_bytes: int) -> None:
        self.exceeded_by: int | None = None
        """The size that was found to be too large."""
        self._files = files
        self._directory = directory
        self._max_bytes = max_bytes
        self._context = session.sparkContext
        self._group = self._context.getLocalProperty(GROUP)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="export-size", daemon=True)

    def __enter__(self) -> SizeLimit:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # The next job of this thread must not be cancelled.
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SIZE_INTERVAL):
            try:
                size = self._files.size(self._directory)
            except Exception as error:  # a file was moved while it was counted, or the store has a fault
                log.debug("size of an export unknown", reason=type(error).__name__)
                continue
            # Spark may have finished meanwhile.
            if size > self._max_bytes and self._group is not None and not self._ended.is_set():
                self.exceeded_by = size
                # Repeatedly: Spark does not cancel a stage that it submits later.
                self._context.cancelJobGroup(self._group)


def _export_name(call: Call, request: ExportRequest) -> str:
    """A name that a redelivered request has again, and that no request of another sender has unless it has the `id`."""
    identity = ("id", request.id) if request.id is not None else ("request", call.correlation_id, call.reply_to)
    if request.id is None and call.correlation_id is None and call.reply_to is None:
        identity = ("once", secrets.token_hex(16))
    # What was exported from earlier data is no answer to a request that needs later data.
    version = required_data_version(call.headers)
    needed = () if version is None else (str(version),)
    return _digest(*identity, request.model_dump_json(), *needed)[:32]


def _digest(*parts: str | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

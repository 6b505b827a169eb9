"""The schema of a local Parquet table, read from the footer of one file without a Spark job.

Spark's own inference starts a job for each table, which takes most of the time to open a small one. This module calls
the code that this job runs, in the driver: the same footer, the same conversion of types. Where Spark would do more
(several files that are merged, partition columns, summary files) the answer is None, and Spark infers the schema.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql.types import StructField, StructType

from osrdyne_worker.spark.failures.errors import describe

_MAGIC = b"PAR1"
_SUMMARIES = frozenset({"_metadata", "_common_metadata"})


def parquet_schema(session: Any, path: str) -> StructType | None:
    """The schema that `session.read.parquet(path)` would infer; None if only Spark can infer it."""
    if not hasattr(session, "_jsparkSession"):
        return None  # Spark Connect reads the files on the server
    file = _first_file(path.removeprefix("file://").removeprefix("file:"))
    if file is None:
        return None
    try:
        return _read(session, file)
    except Exception:  # unreadable, or another version of Spark: Spark reports the error, or infers the schema
        return None


class ReadableColumns(NamedTuple):
    """The columns of a Parquet table that Spark can read. `dropped`: the names of the others, each with the reason."""

    schema: StructType
    dropped: dict[str, str]


def readable_columns(session: Any, path: str) -> ReadableColumns | None:
    """The columns of the first file by name, without those of directories; None if the path is not local, or has no
    file that is Parquet."""
    if not hasattr(session, "_jsparkSession"):
        return None
    place = Path(path.removeprefix("file://").removeprefix("file:"))
    files = sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
    data = [file for file in files if not any(part.startswith(("_", ".")) for part in file.relative_to(place).parts)]
    try:
        first = next((file for file in data if _is_parquet(file)), None)
        return None if first is None else _readable(session, first)
    except Exception:  # unreadable, or another version of Spark: Spark reports the error
        return None


def _is_parquet(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


def _readable(session: Any, file: Path) -> ReadableColumns:
    java, state = _java_classes(session.sparkContext._gateway), session._jsparkSession.sessionState()
    path = java.path(java.file(str(file)).toURI())
    message = java.reader.readFooter(state.newHadoopConf(), path, java.without_rows).getFileMetaData().getSchema()
    columns = [message.getType(place) for place in range(message.getFieldCount())]
    names, converter = Counter(column.getName().lower() for column in columns), java.converter(state.conf())
    ignores_case = session.conf.get("spark.sql.caseSensitive") != "true"
    has_times = session.conf.get("spark.sql.timeType.enabled", "false") == "true"
    fields, dropped = list[StructField](), dict[str, str]()
    for column in columns:
        name = column.getName()
        if ignores_case and names[name.lower()] > 1:
            dropped[name] = "another column differs in case only"
            continue
        try:
            schema = converter.convert(java.message(message.getName(), java.list(column)))
        except Exception as error:
            failure = describe(error)
            dropped[name] = str(column) if failure is None else failure.message
            continue
        text = str(schema.json())
        if not has_times and '"time(' in text:
            dropped[name] = "spark.sql.timeType.enabled is not set"
        else:
            fields += StructType.fromJson(json.loads(text)).fields
    return ReadableColumns(StructType(fields), dropped)


def _first_file(local: str) -> Path | None:
    """The file whose footer has the schema: Spark takes the first one by name. None if Spark would look at more."""
    place = Path(local)
    if not place.is_absolute():
        return None
    try:
        if not place.is_dir():
            return place if place.is_file() else None
        found = sorted(place.iterdir())
        if not all(file.is_file() for file in found) or any(file.name in _SUMMARIES for file in found):
            return None
    except OSError:
        return None
    data = [file for file in found if not file.name.startswith(("_", "."))]
    # A file that is still being copied is left out by Spark.
    return data[0] if data and not data[0].name.endswith("._COPYING_") else None


def _read(session: Any, file: Path) -> StructType | None:
    if session.conf.get("spark.sql.parquet.mergeSchema") != "false":
        return None
    java, state = _java_classes(session.sparkContext._gateway), session._jsparkSession.sessionState()
    # The URI of a file escapes its special characters: a `%` in a name is not syntax.
    path = java.path(java.file(str(file)).toURI())
    metadata = java.reader.readFooter(state.newHadoopConf(), path, java.without_rows)
    schema = java.format.readSchemaFromFooter(java.footer(path, metadata), java.converter(state.conf()))
    return StructType.fromJson(json.loads(schema.json()))


class _JavaClasses(NamedTuple):
    file: Any
    path: Any
    reader: Any
    without_rows: Any
    footer: Any
    format: Any
    converter: Any
    message: Any
    list: Any


def _java_list(gateway: Any, element: Any) -> Any:
    elements = gateway.jvm.java.util.ArrayList()
    elements.add(element)
    return elements


@lru_cache(maxsize=1)
def _java_classes(gateway: Any) -> _JavaClasses:
    """The classes, resolved once: py4j calls the JVM for each part of a name."""
    jvm = gateway.jvm
    hadoop, parquet = jvm.org.apache.parquet.hadoop, jvm.org.apache.spark.sql.execution.datasources.parquet
    return _JavaClasses(
        file=jvm.java.io.File,
        path=jvm.org.apache.hadoop.fs.Path,
        reader=hadoop.ParquetFileReader,
        without_rows=jvm.org.apache.parquet.format.converter.ParquetMetadataConverter.SKIP_ROW_GROUPS,
        footer=hadoop.Footer,
        format=parquet.ParquetFileFormat,
        converter=parquet.ParquetToSparkSchemaConverter,
        message=jvm.org.apache.parquet.schema.MessageType,
        list=partial(_java_list, gateway),
    )

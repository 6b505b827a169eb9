"""Names the setting to change when Spark lacks the jar of a data source, file system or class. Reads text only; imports
no pyspark.

Used by `errors` for requests, by `session` for the start, and by the SQL pipeline for its views.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_MISSING = (
    re.compile(r"Failed to find (?:the )?data source: `?([\w$-]+(?:\.[\w$-]+)*)"),
    re.compile(r"(?:ClassNotFoundException|NoClassDefFoundError): (?:Class )?([\w.$/]+)"),
    re.compile(r"with the plugin class '([\w.$]+)': cannot find"),
    re.compile(r'No FileSystem for scheme "?(\w+)"?'),
    re.compile(r"(No suitable driver)"),
)
_PACKAGES = tuple(
    (re.compile(pattern, re.IGNORECASE), coordinates, note)
    for pattern, coordinates, note in (
        (
            r"^iceberg$|\.iceberg\.",
            "org.apache.iceberg:iceberg-spark-runtime-{minor}_{scala}:VERSION",
            "if there is one",
        ),
        (r"avro", "org.apache.spark:spark-avro_{scala}:{spark}", ""),
        (r"protobuf", "org.apache.spark:spark-protobuf_{scala}:{spark}", ""),
        (r"kafka", "org.apache.spark:spark-sql-kafka-0-10_{scala}:{spark}", ""),
        (r"^s3n?$", "org.apache.hadoop:hadoop-aws:{hadoop}", "and write s3a:// in paths"),
        (r"^s3a$|\.s3a\.", "org.apache.hadoop:hadoop-aws:{hadoop}", ""),
        (r"^(abfs|wasb)s?$|\.azure", "org.apache.hadoop:hadoop-azure:{hadoop}", ""),
        (r"^gs$|\.gs\.", "com.google.cloud.bigdataoss:gcs-connector:VERSION", "a version for Hadoop 3"),
        (r"no suitable driver|jdbc|\.driver$", "GROUP:ARTIFACT:VERSION", "of the database's JDBC driver"),
    )
)
_DELTA = re.compile(r"^delta$|^io\.delta\.", re.IGNORECASE)
_DELTA_PACKAGE = re.compile(r"\bio\.delta:delta-spark_(?:(\d+\.\d+)_)?[\d.]+:")
"""With the version of Spark since Delta Lake 4.1."""
_OF_SPARK_ITSELF = re.compile(r"^(?:java|scala|org\.apache\.spark)\.")
NEWEST_DELTA, NEWEST_SPARK_OF_DELTA = "4.4.0", (4, 2)
"""The newest release of Delta Lake, and the newest Spark that it supports."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions that a jar must fit. `hadoop` is empty if the installation does not show it."""

    spark: str
    scala: str
    hadoop: str = ""
    has_delta: bool = False
    """Whether a jar of Delta Lake is among those of pyspark."""

    @property
    def spark_minor(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.spark)[:2])


def installed_versions() -> Versions:
    """The versions of the installed pyspark, from the names of its jars."""
    spec = find_spec("pyspark")
    jars = Path(spec.origin).parent / "jars" if spec is not None and spec.origin is not None else None
    names = " ".join(path.name for path in jars.iterdir()) if jars is not None and jars.is_dir() else ""
    core = re.search(r"spark-core_([\d.]+)-(\d[\w.]*?)\.jar", names)
    hadoop = re.search(r"hadoop-client-api-(\d[\w.]*?)\.jar", names)
    return Versions(
        core[2] if core else "4.0", core[1] if core else "2.13", hadoop[1] if hadoop else "", "delta-spark" in names
    )


def remedy(text: str, versions: Versions | None = None) -> str | None:
    """The remedy for a message of Spark about a missing jar; None for any other message."""
    name = next((found[1].replace("/", ".") for pattern in _MISSING if (found := pattern.search(text))), None)
    if name is None:
        return None
    versions = versions or installed_versions()
    minor = ".".join(map(str, versions.spark_minor))
    if _DELTA.search(name):
        if versions.spark_minor > NEWEST_SPARK_OF_DELTA:
            return _no_delta(versions)
        return _set(f"io.delta:delta-spark_{minor}_{versions.scala}:{NEWEST_DELTA}")
    for pattern, coordinates, note in _PACKAGES:
        if pattern.search(name):
            fitting = coordinates.format(
                minor=minor, scala=versions.scala, spark=versions.spark, hadoop=versions.hadoop or "VERSION"
            )
            return _set(fitting, note)
    if _OF_SPARK_ITSELF.match(name):
        return None
    return _set("GROUP:ARTIFACT:VERSION", f"of the jar with {name}, for Spark {minor} and Scala {versions.scala}")


def delta_problem(spark_conf: Mapping[str, object], versions: Versions | None = None) -> str | None:
    """Why the format `delta` cannot work with the installed Spark and the jars of `spark_conf`; None if it may work."""
    versions = versions or installed_versions()
    minor = ".".join(map(str, versions.spark_minor))
    packages = str(spark_conf.get("spark.jars.packages", ""))
    found = _DELTA_PACKAGE.search(packages)
    if found is None:
        elsewhere = versions.has_delta or "delta" in str(spark_conf.get("spark.jars", ""))
        return None if elsewhere or versions.spark_minor <= NEWEST_SPARK_OF_DELTA else _no_delta(versions)
    if found[1] == minor:
        return None
    problem = (
        f"worker.spark_conf.spark.jars.packages has a jar of Delta Lake for Spark {found[1] or 3}, and the workers "
        f"have PySpark {versions.spark}."
    )
    if versions.spark_minor > NEWEST_SPARK_OF_DELTA:
        return f"{problem} {_no_delta(versions)}"
    return f"{problem} {_set(f'io.delta:delta-spark_{minor}_{versions.scala}:{NEWEST_DELTA}')}"


def _no_delta(versions: Versions) -> str:
    newest = ".".join(map(str, NEWEST_SPARK_OF_DELTA))
    return (
        f"Delta Lake {NEWEST_DELTA} has no jar for Spark {versions.spark}: install osrdyne[delta] "
        f"(pyspark=={newest}.0, delta-spark=={NEWEST_DELTA}) and set worker.spark_conf.spark.jars.packages to "
        f"io.delta:delta-spark_{newest}_2.13:{NEWEST_DELTA}."
    )


def _set(coordinates: str, note: str = "") -> str:
    return f"Set worker.spark_conf.spark.jars.packages to {coordinates}{f' ({note})' if note else ''}."

"""The class data sharing archive: parsed and verified classes, which a JVM maps instead of loading them from jars.

`session` uses an archive that fits; without an archive a JVM only starts more slowly. `pipelines.training` creates one:
its JVM records the classes that it loads, and writes them when it exits. With `-Xshare:auto` the JVM itself refuses an
archive from another Java or from other jars. Imports no pyspark.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from osrdyne.errors import ConfigurationError
from osrdyne.user_directories import cache_directory
from osrdyne_worker.spark.java.surroundings import quoted

DRIVER_OPTIONS = "spark.driver.extraJavaOptions"
EXTRA_CLASS_PATH = "spark.driver.extraClassPath"
ABANDONED_AFTER = 3600.0
NO_PYSPARK = "This worker needs pyspark: install osrdyne[spark]."
_CORE = re.compile(r"spark-core_[\d.]+-(.+)\.jar\Z")
_VERSION = re.compile(r"""__version__\b.*["'](\d[^"']*)["']""")
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""Options that suppress the JVM's warning in the worker's log about a refused archive."""
_OWN_CHOICE = ("-Xshare", "-XX:SharedArchiveFile", "-XX:ArchiveClassesAtExit", "AutoCreateSharedArchive")


def system_directory() -> Path:
    """The directory of archives in an image: below the Python environment of the worker."""
    return Path(sys.prefix) / "share" / "osrdyne" / "class-data"


def user_directory() -> Path:
    """The directory of this user's archives, below the cache directory."""
    return cache_directory() / "class-data"


def archive_stem(conf: Mapping[str, str]) -> str | None:
    """The beginning of an archive's name, from this Java, this Spark and the class path. None without Java or Spark.

    The rest of the name is the size in bytes, because a JVM crashes on a truncated archive.
    """
    java, spark = _java_home(), spark_home()
    if java is None or spark is None:
        return None
    jars = spark / "jars"
    facts = [
        str(java),
        _text(java / "release") or str(_modified(java / "bin" / "java")),
        str(spark),
        str(_modified(jars)),
        # Parts of the class path that Spark's launcher puts before or after the jars.
        *(os.environ.get(name, "") for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")),
        conf.get(EXTRA_CLASS_PATH, ""),
    ]
    return hashlib.sha256("\0".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def find_archive(conf: Mapping[str, str]) -> Path | None:
    """The archive that fits; None if there is none."""
    stem = archive_stem(conf)
    if stem is None:
        return None
    return next(
        filter(None, (archive_in(directory, stem) for directory in (system_directory(), user_directory()))), None
    )


def archive_in(directory: Path, stem: str) -> Path | None:
    """The archive in a directory, if it is complete and no other user could have written it: an archive is code."""
    for path in sorted(directory.glob(f"{stem}.*.jsa")):
        with suppress(OSError):
            found = path.stat()
            is_ours = found.st_uid in {0, os.geteuid()} and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if is_ours and path.name == _name(stem, found.st_size):
                return path
    return None


def _name(stem: str, size: int) -> str:
    return f"{stem}.{size}.jsa"


def with_archive(conf: Mapping[str, str]) -> dict[str, str]:
    """`conf` with the JVM options that use the archive, if there is one. The user's own options take precedence."""
    options = conf.get(DRIVER_OPTIONS, "")
    archive = None if any(choice in options for choice in _OWN_CHOICE) else find_archive(conf)
    if archive is None:
        return dict(conf)
    shared = quoted(f"-XX:SharedArchiveFile={archive}")
    return {**conf, DRIVER_OPTIONS: f"-Xshare:auto {shared} {_QUIET} {options}".strip()}


def recording(conf: Mapping[str, str], target: Path) -> dict[str, str]:
    """`conf` with the JVM option that writes the archive when the JVM exits."""
    options = conf.get(DRIVER_OPTIONS, "")
    written = quoted(f"-XX:ArchiveClassesAtExit={target}")
    return {**conf, DRIVER_OPTIONS: f"{written} {_QUIET} {options}".strip()}


@contextmanager
def written_aside(directory: Path, stem: str) -> Iterator[Path]:
    """A temporary path. If a file exists there at the end, it becomes the archive; no JVM sees an incomplete archive.

    An earlier archive of the same name is removed; JVMs that have mapped it can use it until they end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(".*.unfinished"):  # left by a training run that was killed
        with suppress(FileNotFoundError):  # another run has just ended
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER:
                left.unlink()
    unfinished = directory / f".{stem}.{os.getpid()}.unfinished"
    try:
        yield unfinished
        if unfinished.exists():
            unfinished.chmod(0o644)
            finished = directory / _name(stem, unfinished.stat().st_size)
            unfinished.replace(finished)
            for former in directory.glob(f"{stem}.*.jsa"):
                if former != finished:
                    former.unlink(missing_ok=True)
    finally:
        unfinished.unlink(missing_ok=True)


def _java_home() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    return Path(java).resolve().parents[1] if java and Path(java).exists() else None


def spark_home() -> Path | None:
    """The installation of Spark, without importing pyspark."""
    if chosen := os.environ.get("SPARK_HOME"):
        return Path(chosen)
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent
    # PySpark downloads another Spark if it is installed with PYSPARK_HADOOP_VERSION, and prefers that one.
    distribution = home / "spark-distribution"
    return distribution if (distribution / "bin" / "spark-submit").is_file() else home


def require_spark_home() -> Path:
    """The installation of Spark that fits PySpark. Raises `ConfigurationError`."""
    home = spark_home()
    if home is None:
        raise ConfigurationError(NO_PYSPARK)
    if not os.environ.get("SPARK_HOME"):
        return home
    ours = _pyspark_version()
    if not (home / "bin" / "spark-submit").is_file():
        raise ConfigurationError(
            f"SPARK_HOME is {home}, where there is no bin/spark-submit: unset SPARK_HOME to use the Spark of PySpark "
            f"{ours}."
        )
    theirs = next(
        (found[1] for jar in (home / "jars").glob("spark-core_*.jar") if (found := _CORE.match(jar.name))), None
    )
    if theirs is not None and ours is not None and _minor(theirs) != _minor(ours):
        raise ConfigurationError(
            f"SPARK_HOME is {home}, which is Spark {theirs}, and this worker has PySpark {ours}: unset SPARK_HOME, or "
            f"install pyspark=={theirs}."
        )
    return home


def _pyspark_version() -> str | None:
    """The version of PySpark, without importing it."""
    spec = find_spec("pyspark")
    found = (
        None if spec is None or spec.origin is None else _VERSION.search(_text(Path(spec.origin).parent / "version.py"))
    )
    return None if found is None else found[1]


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _modified(path: Path) -> int:
    """The modification time in whole seconds: image layers store no fractions."""
    with suppress(OSError):
        return int(path.stat().st_mtime)
    return 0

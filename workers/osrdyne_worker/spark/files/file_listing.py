"""The files below a path in any file system of Hadoop, as HDFS or an object store. Used by pipelines, in threads.

`FileListing.java` lists them in slices: one call to the JVM for many files, and never all of them in one answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from osrdyne_worker.spark.failures.errors import describe
from osrdyne_worker.spark.java.janino import compiled_class

SLICE = 1_000
"""Entries of one call to the JVM."""
MAX_LEVELS = 20
LIST_TIMEOUT = 30.0
"""Seconds after which no further slice is requested. The time-outs of the file system limit each slice."""


class ListingError(Exception):
    """The files cannot be listed. The message has one line."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file or directory. `path`: below the root, escaped as in a URL, empty for the root. `modified`: in seconds
    since the epoch; `identity`: differs for another content, or `-` if the file system has none."""

    path: str
    is_directory: bool
    size: int
    modified: float
    identity: str


def list_files(
    session: Any, path: str, *, timeout: float = LIST_TIMEOUT, monotonic: Callable[[], float] = time.monotonic
) -> Iterator[ListedFile]:
    """The path itself and all below it. Raises `FileNotFoundError` if it does not exist, and `ListingError`."""
    end = monotonic() + timeout
    listing = _listing_factory(session.sparkContext._gateway)(session, path)
    while (text := _next_slice(listing, path)) is not None:
        for line in text.splitlines():
            kind, size, modified, identity, below = line.split(" ", 4)
            yield ListedFile(below.strip("/"), kind == "d", int(size), int(modified) / 1000, identity)
        if monotonic() > end:
            raise ListingError(f"The listing of {path} took longer than {timeout:g} s.")


def _next_slice(listing: Any, path: str) -> str | None:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    try:
        text = listing.slice(SLICE)
    except Exception as error:
        cause = error.java_exception if isinstance(error, Py4JJavaError) else None
        if cause is not None and str(cause.getClass().getSimpleName()) == "FileNotFoundException":
            raise FileNotFoundError(path) from None
        failure = describe(error)
        if failure is None:
            raise
        raise ListingError(f"{path} cannot be listed: {failure.message}") from None
    return None if text is None else str(text)


@lru_cache(maxsize=1)
def _listing_factory(gateway: Any) -> Callable[[Any, str], Any]:
    """A function that creates a `FileListing` for a session and a path."""
    listing = compiled_class(gateway, files(__package__) / "FileListing.java")
    types = gateway.new_array(gateway.jvm.Class, 3)
    types[0] = gateway.jvm.Class.forName("org.apache.hadoop.conf.Configuration")
    types[1] = gateway.jvm.Class.forName("java.lang.String")
    types[2] = gateway.jvm.java.lang.Integer.TYPE
    constructor = listing.getDeclaredConstructor(types)

    def create(session: Any, path: str) -> Any:
        arguments = gateway.new_array(gateway.jvm.Object, 3)
        # With the settings of the session: credentials of object stores are among them.
        arguments[0] = session._jsparkSession.sessionState().newHadoopConf()
        arguments[1], arguments[2] = path, MAX_LEVELS
        return constructor.newInstance(arguments)

    return create

"""How the keys of a pooled process share the cores of a local Spark; the rules are in `KeyScheduling.java`.

Spark makes its scheduler with the cluster manager of its master, which it looks up as a Java service. There is no jar:
the class is compiled before the session is built, and the thread that builds it has a class loader that finds it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from osrdyne.protocol.spark_master import MasterKind, SparkMaster
from osrdyne_worker.spark.java.janino import compiled_class

_SERVICE = "META-INF/services/org.apache.spark.scheduler.ExternalClusterManager"


def master_of_keys(master: SparkMaster) -> SparkMaster:
    """The master of a session that several keys share: the cores of `local` are divided among them. Clusters keep the
    fair scheduler of Spark."""
    if master.kind is not MasterKind.LOCAL:
        return master
    cores = "1" if master.text == "local" else master.text.removeprefix("local[").removesuffix("]")
    return replace(master, text=f"local[{cores}, keys]")


@contextmanager
def scheduler_of_keys(master: SparkMaster) -> Iterator[None]:
    """Let this thread build a session of `master_of_keys` in the JVM that pyspark is connected with."""
    if master.kind is not MasterKind.LOCAL:
        yield
        return
    from pyspark import SparkContext

    SparkContext._ensure_initialized()
    gateway: Any = SparkContext._gateway
    java = gateway.jvm
    thread = java.Thread.currentThread()
    before = thread.getContextClassLoader()
    source = files(__package__) / "KeyScheduling.java"
    compiled = compiled_class(gateway, source)
    with tempfile.TemporaryDirectory(prefix="osrdyne-scheduler-") as directory:
        service = Path(directory, _SERVICE)
        service.parent.mkdir(parents=True)
        service.write_text(f"{compiled.getName()}\n", encoding="utf-8")
        urls = gateway.new_array(java.java.net.URL, 1)
        urls[0] = java.java.io.File(directory).toURI().toURL()
        loader = java.java.net.URLClassLoader(urls, compiled.getClassLoader())
        thread.setContextClassLoader(loader)
        try:
            yield
        finally:
            thread.setContextClassLoader(before)
            loader.close()
